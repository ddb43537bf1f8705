#!/usr/bin/env bash
# DeepSpeed's launcher: all GPUs of this host, those of --include, or the hosts of a --hostfile.
#   launch/single_node.sh --config configs/1b.json
#   launch/single_node.sh --include localhost:0,1 -- --config configs/1b.json --set training.seed=2
# What precedes `--` goes to deepspeed, the rest to train.py. `--print` first: show, do not run.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

print=()
if [ "${1:-}" = --print ]; then print=(--print); shift; fi
[[ " $* " == *" -- "* ]] || set -- -- "$@"

exec python -m launch.run "${print[@]}" deepspeed --no_local_rank "$@"
