"""Command: a checkpoint to and from a folder of transformers' GPT-2, GPT-NeoX or Llama.

    python -m training.convert export --checkpoint runs/quickstart --output exported

Both ways compare the logits of the two sides, and leave nothing where they differ.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.schema import load_config
from training.checkpoint import NoCheckpoint
from training.export import NO_TOKENIZER, export
from training.import_model import import_model
from training.logits import LogitsDiffer

DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to clean up
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed tells of its accelerator
            done = options.run(options)
        print(done)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (LogitsDiffer, NoCheckpoint) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], prog="python -m training.convert"
    )
    commands = parser.add_subparsers(required=True, metavar="export|import")
    out = commands.add_parser(
        "export", help="write a folder that transformers loads",
        epilog="example: python -m training.convert export --checkpoint runs/quickstart@400 "
        "--output exported --dtype bfloat16",
    )  # fmt: skip
    out.add_argument(
        "--checkpoint", required=True, metavar="RUN[@STEP]",
        help="a run folder: its newest checkpoint, or that of a step",
    )  # fmt: skip
    out.add_argument("--output", required=True, type=Path, help="the folder to make")
    out.add_argument("--dtype", choices=DTYPES, help="left out: what the run computes in")
    out.add_argument(
        "--tokenizer", help=f"left out: the run's; {NO_TOKENIZER} writes the weights without one"
    )
    out.set_defaults(
        run=lambda options: export(
            options.checkpoint, options.output, options.dtype, options.tokenizer
        )
    )
    back = commands.add_parser(
        "import", help="make a run folder that train.py starts from",
        epilog="example: python -m training.convert import --source downloads/pythia-160m "
        "--config pythia.json",
    )  # fmt: skip
    back.add_argument(
        "--source", required=True, type=Path, help="a folder of config.json and safetensors"
    )
    back.add_argument(
        "--config", required=True, help="the run's JSON file; its training.run_folder is made"
    )
    back.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="override a key of the config, as train.py does (repeatable)",
    )  # fmt: skip
    back.set_defaults(
        run=lambda options: import_model(
            options.source, load_config(options.config, options.overrides)
        )
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
