"""`polar-trl plan`: where the memory of a GPU would go, and whether a run fits."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polar_trl.grpo.memory.memory import MemoryPlan
    from polar_trl.tools.memory_plan.hours import Hours
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
        help="where the memory of a GPU would go, whether a run fits, and its hours",
        description="Count the memory of one GPU, phase by phase, and estimate hours, before anything is started.",
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
    parser.add_argument(
        "--session_tokens",
        type=int,
        metavar="N",
        help="of a session at its end, for the run's hours (default: half of vllm_max_model_length)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run, overrides=[])


def run(args: argparse.Namespace) -> int:
    """`polar-trl plan`."""
    # torch, transformers and TRL; the other subcommands start without
    from polar_trl.tools.memory_plan.plan import estimate, find_advice, plan, read_run

    setup, settings = read_run(args.config, args.overrides, gpu=args.gpu, gpus=args.gpus, accelerate=args.accelerate)
    found = plan(setup)
    hours = estimate(setup, settings, found, session_tokens=args.session_tokens)
    advice = [] if found.fits else find_advice(setup, found)
    if args.json:
        print(json.dumps(_build_plan_json(found, hours, advice)))
    else:
        _print_plan(found, hours, advice)
    return 0 if found.fits else 1


def _build_plan_json(found: "MemoryPlan", hours: "Hours", advice: Sequence["Advice"]) -> dict[str, Any]:
    return {
        "fits": found.fits,
        "gpu_bytes": found.gpu_bytes,
        "phases": {name: {"total": found.total(name), **parts} for name, parts in found.phases.items()},
        "kv_tokens": found.kv_tokens,
        "kv_sessions": found.kv_sessions,
        "max_model_len": found.max_model_len,
        "kernels": asdict(found.kernels),
        "checkpointed_layers": found.checkpointed_layers,
        "num_layers": found.num_layers,
        "hours": {**asdict(hours), "step_s": hours.step_s, "hours": hours.hours},
        "advice": [asdict(item) for item in advice],
    }


def _print_plan(found: "MemoryPlan", hours: "Hours", advice: Sequence["Advice"]) -> None:
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
    console.print(
        f"checkpointed: {found.checkpointed_layers} of {found.num_layers} layers in the largest pass, "
        f"{_gib(found.total('training'))} GiB at its worst moment"
    )
    console.print(_describe_hours(hours), markup=False)
    console.print("it fits" if found.fits else "it does not fit")
    fullest = max(found.phases, key=found.total)
    for item in advice:
        console.print(
            f"  {item.change}: frees {_gib(item.saved_bytes)} GiB in {fullest!r}" + (", and it fits" * item.fits),
            markup=False,
            highlight=False,
        )


def _describe_hours(hours: "Hours") -> str:
    steps = "a step" if hours.hours is None else f"{hours.hours:.3g} h for {hours.num_steps:,} steps"
    return (
        f"time, by rates of an H200: {steps} of {hours.sessions} sessions on each GPU that end at "
        f"{hours.session_tokens:,} tokens, 30% of them sampled; a step's rollouts {hours.rollouts_s:.0f} s, training "
        f"{hours.training_s:.0f} s; tools, graders and stragglers come on top"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f}"
