"""`polar-trl plan`: where the memory of a GPU would go, and whether a run fits."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polar_trl.grpo.memory.memory import MemoryPlan
    from polar_trl.tools.memory_plan.plan import Advice

EPILOG = """\
examples:
  polar-trl plan --config pi_1gpu --gpu 80GB
  polar-trl plan --config my_run.yaml --gpu 80GB --gpus 8 --accelerate fsdp2
  polar-trl plan --config my_run.yaml --gpu 24GB --lora_r 16 --max_tokens_per_device 16384

Other flags are keys of the run, as polar-trl train takes them. Only the model's configuration is read. Exits with 1
if the run does not fit; see docs/scaling.md for what is counted and what is estimated.
"""

_DELTA_NETS = {
    True: "counted with flash-linear-attention, installed here or expected (pip install 'polar-trl[kernels]')",
    False: "counted in torch, since flash-linear-attention is not installed here",
}


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="where the memory of a GPU would go, and whether a run fits",
        description="Count the memory of one GPU, phase by phase, before anything is started.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what is left are keys of the run
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="the run file, or the name of one of ours"
    )
    parser.add_argument("--gpu", required=True, metavar="SIZE", help="memory of one GPU, such as 80GB")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many (default: the accelerate file's, or 1)")
    parser.add_argument(
        "--accelerate", metavar="FILE", help="as polar-trl train gets it: a file, or the name of one of ours"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """`polar-trl plan`."""
    # torch, transformers and TRL; the other subcommands start without
    from polar_trl.tools.memory_plan.plan import find_advice, plan, read_setup

    setup = read_setup(args.config, args.overrides, gpu=args.gpu, gpus=args.gpus, accelerate=args.accelerate)
    found = plan(setup)
    advice = [] if found.fits else find_advice(setup, found)
    if args.json:
        print(json.dumps(_build_plan_json(found, advice)))
    else:
        _print_plan(found, advice)
    return 0 if found.fits else 1


def _build_plan_json(found: "MemoryPlan", advice: Sequence["Advice"]) -> dict[str, Any]:
    return {
        "fits": found.fits,
        "gpu_bytes": found.gpu_bytes,
        "phases": {name: {"total": found.total(name), **parts} for name, parts in found.phases.items()},
        "kv_tokens": found.kv_tokens,
        "kv_sessions": found.kv_sessions,
        "max_model_len": found.max_model_len,
        "kernels": asdict(found.kernels),
        "advice": [asdict(item) for item in advice],
    }


def _print_plan(found: "MemoryPlan", advice: Sequence["Advice"]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("GiB of one GPU")
    for phase in found.phases:
        table.add_column(phase, justify="right")
    names = dict.fromkeys(name for parts in found.phases.values() for name in parts)
    for name in names:
        table.add_row(name, *(_gib(parts[name]) if name in parts else "" for parts in found.phases.values()))
    table.add_section()
    table.add_row("in all", *(_gib(found.total(phase)) for phase in found.phases))
    table.add_row("of", *(_gib(found.gpu_bytes) for _ in found.phases))
    console = Console()
    console.print(table)
    console.print(
        f"key-value cache: {found.kv_tokens:,} tokens, {found.kv_sessions:,} sessions of {found.max_model_len:,}"
    )
    if found.is_hybrid:
        console.print(f"gated delta nets: {_DELTA_NETS[found.kernels.fla]}", markup=False)
    console.print("it fits" if found.fits else "it does not fit")
    fullest = max(found.phases, key=found.total)
    for item in advice:
        console.print(
            f"  {item.change}: frees {_gib(item.saved_bytes)} GiB in {fullest!r}" + (", and it fits" * item.fits),
            markup=False,
            highlight=False,
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f}"
