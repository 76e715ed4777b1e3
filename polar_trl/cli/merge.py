"""`polar-trl merge`: write a LoRA adapter and its base model as one model."""

import argparse
from pathlib import Path
from typing import Any

from polar_trl.errors import ConfigError

EPILOG = """\
examples:
  polar-trl merge runs/mine runs/mine-merged                     the adapter that a run has saved at its end
  polar-trl merge runs/mine/checkpoint-70 runs/mine-70

It is merged in float32 on the CPU (4 bytes of memory per weight) and saved in the dtype of the base, with tokenizer
and chat template. An adapter that is merged there already is left as it is.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "merge",
        help="write a LoRA adapter and its base as one model",
        description="Merge a LoRA adapter into the model that it was trained on.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("adapter", metavar="ADAPTER", help="a folder with adapter_config.json")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of the merged model")
    parser.add_argument("--trust_remote_code", action="store_true", help="let the base model run code of its own")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """`polar-trl merge`. Raises `ConfigError` where ADAPTER is none, or OUT holds anything else."""
    from polar_trl.grpo.resume.model_folder import find_model, merge_adapter

    checkpoint = find_model(args.adapter, trust_remote_code=args.trust_remote_code)
    if checkpoint.base is None:
        raise ConfigError(f"{args.adapter} is a whole model, no adapter; there is nothing to merge")
    folder = merge_adapter(checkpoint, args.out, trust_remote_code=args.trust_remote_code)
    print(f"{checkpoint.base} with {checkpoint.name} is in {folder}")
    return 0
