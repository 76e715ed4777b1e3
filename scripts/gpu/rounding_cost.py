#!/usr/bin/env python3
"""Time the rounding of trained weights against the rest of a step, at the sizes of a real model.

  bash scripts/gpu/run.sh rounding_cost                         Qwen3-4B, all weights trained, passes of 16,384 tokens
  bash scripts/gpu/run.sh rounding_cost --model qwen3-0.6b
  bash scripts/gpu/run.sh rounding_cost --tiny                  a CPU: small sizes, short rows

Weights are random float32 masters made on the device; the pass is bfloat16 autocast with gradient checkpointing over
rows that fill it (those of train_cost.py); the optimizer is AdamW, fused on a GPU. `RoundedWeights` puts the masters
back before an optimizer step and rounds them after it. Each part is timed by itself, and the median after two times
that warm up counts. A step is one optimizer step and one pass, or eight. Gigabytes are those that a part keeps, and
those that it takes beyond them while it runs.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_train import read_peak, reset_peak
from report import Report
from train_cost import Case, build_trainer, read_clock

from polar_trl.grpo.weights.rounded_weights import RoundedWeights

WARM_UP = 2
MANY = 8
COLUMNS = {
    "part": "part",
    "seconds": "seconds",
    "share_one": "share of a step of one pass %",
    "share_many": f"of {MANY} passes %",
    "kept_gb": "kept GB",
    "beyond_gb": "while it runs GB",
}


def read_gb() -> float:
    """Return what torch has allocated on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def measure(*calls: Callable[[], Any], repeat: int) -> list[dict[str, float]]:
    """Median seconds and temporary gigabytes of each of the calls, which run in turns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times: list[list[float]] = [[] for _ in calls]
    peaks: list[list[float]] = [[] for _ in calls]
    for _ in range(WARM_UP + repeat):
        for call, call_times, call_peaks in zip(calls, times, peaks, strict=True):
            before = read_gb()
            reset_peak(device)
            started = read_clock()
            call()
            call_times.append(read_clock() - started)
            call_peaks.append(read_peak(device) / 1e9 - max(before, read_gb()))
    return [
        {
            "seconds": statistics.median(call_times[WARM_UP:]),
            **({"beyond_gb": statistics.median(call_peaks[WARM_UP:])} if device.type == "cuda" else {}),
        }
        for call_times, call_peaks in zip(times, peaks, strict=True)
    ]


def run(case: Case, args: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory() as out:
        trainer = build_trainer(case, out, tiny=args.tiny)
    trainer.model.float()
    named = [(name, weight) for name, weight in trainer.model.named_parameters() if weight.requires_grad]
    weights = [weight for _, weight in named]
    report.note(model=case.model, trained_weights=sum(weight.numel() for weight in weights))
    report.say(f"{case.label}: {report.content['trained_weights']:,} float32 weights made")

    def run_pass() -> None:
        trainer._step, trainer.current_gradient_accumulation_steps, trainer.step.windows = 0, 1, None
        trainer.training_step(trainer.model, [{}])

    started_gb = read_gb()
    (pass_,) = measure(run_pass, repeat=args.repeat)
    pass_["kept_gb"] = read_gb() - started_gb
    report.say(f"forward and backward: {pass_}")
    optimizer = torch.optim.AdamW(weights, lr=1e-6, fused=weights[0].is_cuda)
    started_gb = read_gb()
    optimizer.step()
    states_gb, started_gb, started = read_gb() - started_gb, read_gb(), read_clock()
    rounded = RoundedWeights(named, dtype=torch.bfloat16, seed=0, dithered=True)
    making = {"seconds": read_clock() - started, "kept_gb": read_gb() - started_gb}
    restoring, adam, rounding = measure(rounded.restore_masters, optimizer.step, rounded.round, repeat=args.repeat)
    parts = {
        "forward and backward": pass_,
        "AdamW": adam | {"kept_gb": states_gb},
        "masters put back": restoring,
        "masters rounded": rounding,
        "rounding in all": {
            "seconds": restoring["seconds"] + rounding["seconds"],
            "kept_gb": making["kept_gb"],
            **({"beyond_gb": max(restoring["beyond_gb"], rounding["beyond_gb"])} if "beyond_gb" in rounding else {}),
        },
        "offsets, once in a run": making,
    }
    for name, figures in parts.items():
        shares = {}
        for key, passes in (("share_one", 1), ("share_many", MANY)):
            own = figures["seconds"] * (passes if figures is pass_ else 1)
            shares[key] = 100 * own / (passes * pass_["seconds"] + adam["seconds"])
        report.add(part=name, **figures, **(shares if figures is not making else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the figures")
    parser.add_argument("--model", default="qwen3-4b", choices=("qwen3-4b", "qwen3-0.6b"))
    parser.add_argument("--repeat", type=int, default=5, help="times after the two that warm up; the median counts")
    parser.add_argument("--tiny", action="store_true", help="small sizes and short rows, for a CPU")
    args = parser.parse_args()
    report = Report("rounding_cost", args.out, COLUMNS)
    case = Case.parse(f"{args.model}:full:16384")
    try:
        run(case, args, report)
    except Exception as error:  # noqa: BLE001 - the parts that were measured are printed all the same
        report.fail(error, part=case.label)
    report.finish()


if __name__ == "__main__":
    main()
