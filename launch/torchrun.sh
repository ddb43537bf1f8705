#!/usr/bin/env bash
# torchrun on one host, or, with the same two options on each of them, on several.
#   launch/torchrun.sh --config configs/1b.json
#   launch/torchrun.sh --nnodes 2 --rdzv-endpoint host0:29400 -- --config configs/7b.json
# What precedes `--` goes to torchrun, the rest to train.py. `--print` first: show, do not run.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

print=()
if [ "${1:-}" = --print ]; then print=(--print); shift; fi
[[ " $* " == *" -- "* ]] || set -- -- "$@"

exec python -m launch.run "${print[@]}" python -m torch.distributed.run \
  --nproc-per-node auto --rdzv-backend c10d --rdzv-endpoint localhost:0 "$@"
