#!/usr/bin/env python3
"""Seeds of one run file -> the reward's curve, the gap between trainer and engine, and where a step's time goes.

  bash scripts/gpu/run.sh learn --model .cache/models/SmolLM2-135M-Instruct
  bash scripts/gpu/run.sh learn --model MODEL --seeds 1 --processes 1 2 --name two_gpus        # ranks: one, then two
  bash scripts/gpu/run.sh learn --model MODEL --config configs/ladder_pi.yaml --name pi -- --temperature 0.8

Runs scripts/train.py once per seed and number of processes, one run per GPU at a time, and reads what it logged. What
follows `--` goes to train.py. The batch of a process stays the same, so that two processes roll out twice as much per
step. It refuses to hide a run that failed: its row has the error.
"""

import argparse
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from report import Report
from training_runs import GAP, build_launch, render_gap

from polar_trl.grpo.summary import plot_rewards
from polar_trl.run_log import read_log

GPU_FLAGS = {
    "use_cpu": "false",
    "bf16": "true",
    "vllm_enable_sleep_mode": "true",
    "vllm_gpu_memory_utilization": "0.3",
    "max_agents": "32",
    "max_grading": "8",
    "show_rollout_progress": "false",
    "disable_tqdm": "true",
}
COLUMNS = {
    "seed": "seed",
    "processes": "processes",
    "steps": "steps",
    "reward_first": "reward, first quarter",
    "reward_last": "last quarter",
    "gap_first": "gap mean / p99 / max, first step (nats)",
    "gap_last": "last step",
    "step_s": "s/step",
    "rollouts": "rollouts",
    "training": "training",
    "overhead": "overhead",
    "sync_ms": "push (ms)",
    "sleep_ms": "sleep (ms)",
    "wake_ms": "wake (ms)",
    "sampled_per_s": "sampled tokens/s per GPU",
    "seconds": "seconds in all",
}


@dataclass(eq=False)
class Run:
    """One process group of train.py."""

    seed: int
    processes: int
    folder: Path
    gpus: list[int]
    started: float = 0.0
    ended: float = 0.0
    process: subprocess.Popen[bytes] | None = None

    def start(self, args: argparse.Namespace) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        flags = {**(GPU_FLAGS if torch.cuda.is_available() else {}), "seed": self.seed, "max_steps": args.steps}
        command = build_launch(self.processes)
        command += ["scripts/train.py", "--config", args.config, "--output_dir", str(self.folder)]
        command += ["--model_name_or_path", args.model]
        command += [text for key, value in flags.items() for text in (f"--{key}", str(value))]
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(names[i] if names[0] else str(i) for i in self.gpus)}
        self.started = time.monotonic()
        with self.folder.with_suffix(".txt").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *args.rest], stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **visible}
            )

    def is_over(self) -> bool:
        assert self.process is not None
        if self.process.poll() is None:
            return False
        self.ended = self.ended or time.monotonic()
        return True


def run_all(runs: Sequence[Run], args: argparse.Namespace, report: Report) -> None:
    """Each run on free GPUs, as many at a time as fit."""
    free = list(range(max(1, torch.cuda.device_count())))
    waiting, going = list(runs), list[Run]()
    try:
        while waiting or going:
            while waiting and waiting[0].processes <= len(free):
                run = waiting.pop(0)
                run.gpus, free = free[: run.processes], free[run.processes :]
                run.start(args)
                going.append(run)
                report.say(f"seed {run.seed}, {run.processes} processes: started on GPUs {run.gpus}")
            time.sleep(0.2)
            for run in [run for run in going if run.is_over()]:
                going.remove(run)
                free = sorted([*free, *run.gpus])
                add_run(run, report)
    finally:
        for run in going:
            assert run.process is not None
            run.process.terminate()
            run.process.wait(30)


def add_run(run: Run, report: Report) -> None:
    """A row of the table from a run that is over."""
    assert run.process is not None
    who = {"seed": run.seed, "processes": run.processes}
    steps = [line for line in read_log(run.folder) if "polar/phase/step_s" in line]
    if run.process.returncode != 0 or not steps:
        text = run.folder.with_suffix(".txt").read_text(errors="replace")
        report.fail(RuntimeError(f"train.py ended with {run.process.returncode}: {text.strip()[-250:]}"), **who)
        print(text[-3000:], flush=True)
    if steps:
        report.add(**who, **describe(steps, run), log=steps)


def describe(steps: list[dict[str, Any]], run: Run) -> dict[str, Any]:
    """Figures of a run. Times are those after the first two steps, in which kernels compile and caches fill."""
    rewards = [line["reward"] for line in steps if line.get("reward") is not None]
    quarter = max(1, len(rewards) // 4)
    later = steps[2:] or steps
    total = sum(line["polar/phase/step_s"] for line in later)

    def share(*names: str) -> str:
        seconds = sum(line.get(f"polar/phase/{name}_s") or 0.0 for line in later for name in names)
        return f"{seconds / total:.1%}"

    def milliseconds(name: str) -> float:
        return 1000 * median(line.get(f"polar/phase/{name}_s") or 0.0 for line in later)

    compared = [line for line in steps if line.get(f"{GAP}/mean") is not None]
    return {
        "steps": len(steps),
        "reward_first": fmean(rewards[:quarter]),
        "reward_last": fmean(rewards[-quarter:]),
        "gap_first": render_gap(compared[0]) if compared else "none trained",
        "gap_last": render_gap(compared[-1]) if compared else "none trained",
        "step_s": total / len(later),
        "rollouts": share("rollouts", "resampling"),
        "training": share("training", "optimizer"),
        "overhead": f"{fmean(line['polar/phase/overhead_share'] for line in later):.1%}",
        "sync_ms": milliseconds("weight_sync"),
        "sleep_ms": milliseconds("sleep"),
        "wake_ms": milliseconds("wake"),
        "sampled_per_s": sum(line["polar/sampled_tokens"] for line in later) / total / run.processes,
        "seconds": run.ended - run.started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--config", default="configs/quickstart.yaml", help="run file of scripts/train.py")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", nargs="+", type=int, default=[1], help="ranks; every seed runs with each")
    parser.add_argument("--name", default="learn", help="of the figures and the picture")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for them")
    parser.add_argument("rest", nargs="*", help="after --: flags for scripts/train.py")
    args = parser.parse_args()
    report = Report(args.name, args.out, COLUMNS)
    folder = args.out / f"{args.name}-{time.strftime('%H%M%S')}"
    num_gpus = torch.cuda.device_count()
    if num_gpus and max(args.processes) > num_gpus:
        parser.error(f"--processes {max(args.processes)} needs as many GPUs; this machine has {num_gpus}")
    runs = [
        Run(seed=seed, processes=processes, folder=folder / f"seed{seed}-x{processes}", gpus=[])
        for processes in args.processes
        for seed in args.seeds
    ]
    run_all(runs, args, report)
    curves = {
        f"seed {row['seed']}" + (f", {row['processes']} ranks" if row["processes"] > 1 else ""): [
            line["reward"] for line in row["log"] if line.get("reward") is not None
        ]
        for row in report.content["rows"]
        if "log" in row
    }
    if curves:
        title = f"{Path(args.config).stem}, {Path(args.model).name}, {report.content['machine']}"
        plot_rewards(curves, args.out / f"{args.name}.png", title=title)
    report.finish()


if __name__ == "__main__":
    main()
