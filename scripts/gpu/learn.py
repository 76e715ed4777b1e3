#!/usr/bin/env python3
"""Train arms and seeds of one run file; compare rewards, also at equal time, the gap, and how far weights moved.

  bash scripts/gpu/run.sh learn --model .cache/models/SmolLM2-135M-Instruct --steps 30
  bash scripts/gpu/run.sh learn --model MODEL --steps 30 --arms bfloat16 float32 lora --per_gpu 3 --seconds 500
  bash scripts/gpu/run.sh learn --model MODEL --seeds 1 --processes 1 2 --name two_gpus        # ranks: one, then two
  bash scripts/gpu/run.sh learn --model MODEL --config ladder_pi --name pi -- --temperature 0.8
  bash scripts/gpu/run.sh learn --model MODEL --config ladder_pi --arms merged per_request carry_over --name paper
  bash scripts/gpu/run.sh learn --model MODEL --arms on_grid on_grid_nearest -- --learning_rate 1e-6
  bash scripts/gpu/run.sh learn --model MODEL --config examples/call_rewards/run.yaml \
      --arms session_credit by_turn return_to_go -- --eval_strategy steps --eval_steps 4

Runs scripts/train.py once per arm (a set of flags, `ARMS`), seed and number of processes, and reads what it logged.
What follows `--` goes to train.py. The batch of a process stays the same, so that two processes roll out twice as much
per step. Several runs share a card with --per_gpu; their times are those of a shared card. After --seconds, runs that
go on are stopped and those that wait are left out: the same command with `--resume FILE` (its figures so far) does
what is missing. A run that failed or was stopped is a row with the error.

At equal time: each run up to the time at which the shortest one of its seed and processes ended, starts left out; how
many updates it had made by then, its mean reward over the last third of that time, and that of held-out tasks over all
evaluations by then but the one before the first step. `merged` is the package as it is, but for the layout that it
shares with `per_request`: each row is forwarded whole there, so that the two differ in the rows alone. A CPU trains in
float32: `on_grid` has weights on the engine's bfloat16 grid there.
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from report import Report
from training_runs import GAP, build_launch, render_gap

from polar_trl.grpo.logs.summary import plot_rewards
from polar_trl.run_folder import read_log

ARMS: dict[str, dict[str, str]] = {
    "bfloat16": {"bf16": "true"},
    "bfloat16_nearest": {"bf16": "true", "weight_rounding": "nearest"},
    "float32": {"bf16": "false"},
    "float16": {"bf16": "false", "fp16": "true"},
    "lora": {
        "bf16": "true",
        "use_peft": "true",
        "lora_r": "32",
        "lora_target_modules": "all-linear",
        "learning_rate": "2e-4",
    },
    "on_grid": {"engine_dtype": "bfloat16"},
    "on_grid_nearest": {"engine_dtype": "bfloat16", "weight_rounding": "nearest"},
    "merged": {"sequence_layout": "packed"},
    "per_request": {"sequence_layout": "packed"},
    "carry_over": {"max_policy_lag": "1"},
    "no_carry_over": {},
    "session_credit": {"turn_credit": "none"},
    "by_turn": {"turn_credit": "by_turn"},
    "return_to_go": {"turn_credit": "return_to_go"},
}
"""Flags of train.py. The engine computes in the dtype of the trainer's pass, unless `engine_dtype` is another."""
WRAPPERS = {"per_request": "scripts/gpu/per_request.py"}
"""Scripts that change the package for an arm, and run train.py."""
GPU_FLAGS = {
    "use_cpu": "false",
    "vllm_enable_sleep_mode": "true",
    "vllm_gpu_memory_utilization": "0.3",
    "max_agents": "32",
    "max_grading": "8",
    "show_rollout_progress": "false",
    "disable_tqdm": "true",
}
STOP_S = 15.0
COLUMNS = {
    "arm": "arm",
    "seed": "seed",
    "processes": "processes",
    "steps": "steps",
    "reward_1": "reward, first third",
    "reward_2": "second",
    "reward_3": "last",
    "reward": "all",
    "equal_s": "equal time (s)",
    "equal_updates": "updates by then",
    "equal_reward": "reward then",
    "equal_held_out": "held-out reward till then",
    "held_out": "in the last evaluation",
    "solved": "solved there (%)",
    "rows": "rows per rollout",
    "gap": "gap mean (nats)",
    "gap_last": "gap mean / p99 / max, last step",
    "update_ratio": "update ratio",
    "changed": "weights changed a push",
    "step_s": "s/step",
    "rollouts": "rollouts",
    "training": "training",
    "overhead": "overhead",
    "sync_ms": "push (ms)",
    "seconds": "seconds in all",
}


@dataclass(eq=False)
class Run:
    """One process group of train.py."""

    arm: str
    seed: int
    processes: int
    folder: Path
    gpus: list[int]
    started: float = 0.0
    ended: float = 0.0
    process: subprocess.Popen[bytes] | None = None

    @property
    def who(self) -> dict[str, Any]:
        return {"arm": self.arm, "seed": self.seed, "processes": self.processes}

    def start(self, args: argparse.Namespace) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(names[i] if names[0] else str(i) for i in self.gpus)}
        if args.per_gpu > 1:  # the cores too are shared
            threads = str(max(1, (os.cpu_count() or 1) // args.per_gpu))
            visible |= {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}
        self.started = time.monotonic()
        with self.folder.with_suffix(".txt").open("wb") as log:
            self.process = subprocess.Popen(
                self.build_command(args), stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **visible}
            )

    def build_command(self, args: argparse.Namespace) -> list[str]:
        flags: dict[str, Any] = {**(GPU_FLAGS if torch.cuda.is_available() else {}), **ARMS[self.arm]}
        flags |= {"seed": self.seed, "max_steps": args.steps}
        command = [*build_launch(self.processes), *([WRAPPERS[self.arm]] if self.arm in WRAPPERS else ())]
        command.append("scripts/train.py")
        if args.per_gpu > 1 and torch.cuda.is_available():
            # what has to be free at the start; vLLM would size its cache by what neighbors left free at that moment,
            # and fails where they took memory while it fell asleep
            flags |= {
                "vllm_enable_sleep_mode": "false",
                "vllm_gpu_memory_utilization": "0.05",
                "engine_kwargs": f'{{"kv_cache_memory_bytes": {4 << 30}}}',
            }
        command += ["--config", args.config, "--output_dir", str(self.folder), "--model_name_or_path", args.model]
        return [*command, *(text for key, value in flags.items() for text in (f"--{key}", str(value))), *args.rest]

    def is_over(self) -> bool:
        assert self.process is not None
        if self.process.poll() is None:
            return False
        self.ended = self.ended or time.monotonic()
        return True

    def read_steps(self) -> list[dict[str, Any]]:
        """Its log so far, a line per step, floats to six digits."""
        lines = [line for line in read_log(self.folder) if "polar/phase/step_s" in line]
        return [
            {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in line.items()}
            for line in lines
        ]

    def read_evaluations(self) -> list[dict[str, Any]]:
        """Its evaluations so far: mean reward, and the share of sessions that solved their task."""
        lines = [line for line in read_log(self.folder) if "eval_pass_rate" in line]
        return [{name: line[name] for name in ("step", "eval_reward", "eval_pass_rate")} for line in lines]


class Queue:
    """Runs, each on free GPUs, `--per_gpu` on each at a time.

    A run starts some seconds after the one before it: imports and compiling take all the cores that there are.
    """

    def __init__(self, runs: Sequence[Run], args: argparse.Namespace, report: Report) -> None:
        self._free = list(range(max(1, torch.cuda.device_count()))) * args.per_gpu
        self._waiting, self._going = list(runs), list[Run]()
        self._args, self._report = args, report
        self._began = self._last_start = time.monotonic()

    def work(self) -> None:
        """Until all runs are over, or the time is."""
        try:
            while self._waiting or self._going:
                if time.monotonic() - self._began > self._args.seconds:
                    self._give_up()
                    return
                self._start_next()
                time.sleep(0.2)
                for run in [run for run in self._going if run.is_over()]:
                    self._going.remove(run)
                    self._free += run.gpus
                    add_run(run, self._report)
        finally:
            self._stop()

    def _start_next(self) -> None:
        gpus = sorted(set(self._free), key=lambda gpu: (-self._free.count(gpu), gpu))
        if not self._waiting or self._waiting[0].processes > len(gpus):
            return
        if self._going and time.monotonic() - self._last_start < self._args.stagger:
            return
        run = self._waiting.pop(0)
        run.gpus = gpus[: run.processes]
        for gpu in run.gpus:
            self._free.remove(gpu)
        run.start(self._args)
        self._last_start = time.monotonic()
        self._going.append(run)
        self._report.say(f"{run.arm}, seed {run.seed}, {run.processes} processes: started on GPUs {run.gpus}")

    def _give_up(self) -> None:
        for run in self._waiting:
            self._report.fail(TimeoutError(f"not run: {self._args.seconds:g} s were over"), **run.who)
        stopped = self._stop()
        for run in stopped:
            add_run(run, self._report, problem=f"stopped after {self._args.seconds:g} s")

    def _stop(self) -> list[Run]:
        """End what goes on, all at once; those runs."""
        stopped, self._going = self._going, []
        for run in stopped:
            assert run.process is not None
            run.process.terminate()
        deadline = time.monotonic() + STOP_S
        for run in stopped:
            assert run.process is not None
            try:
                run.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                run.process.kill()
            run.ended = time.monotonic()
        return stopped


def add_run(run: Run, report: Report, *, problem: str = "") -> None:
    """The row of a run that is over."""
    assert run.process is not None
    steps = run.read_steps()
    evaluations = run.read_evaluations()
    row = {**run.who, **(describe(steps, run) if steps else {}), "log": steps, "evaluations": evaluations}
    if not problem and (run.process.returncode != 0 or not steps):
        text = run.folder.with_suffix(".txt").read_text(errors="replace")
        problem = f"train.py ended with {run.process.returncode}: {' '.join(text.split())[-250:]}"
        print(text[-3000:], flush=True)
    if problem:
        report.fail(RuntimeError(problem), **row)
    else:
        report.add(**row)


def describe(steps: list[dict[str, Any]], run: Run) -> dict[str, Any]:
    """Figures of a run. Times leave out its first two steps, in which kernels compile and caches fill."""
    rewards = [line["reward"] for line in steps if line.get("reward") is not None] or [float("nan")]
    third = max(1, len(rewards) // 3)
    later = steps[2:] or steps
    total = sum(line["polar/phase/step_s"] for line in later)

    def share(*names: str) -> str:
        seconds = sum(line.get(f"polar/phase/{name}_s") or 0.0 for line in later for name in names)
        return f"{seconds / total:.1%}"

    def average(name: str) -> float | str:
        values = [line[name] for line in steps if line.get(name) is not None]
        return fmean(values) if values else ""

    compared = [line for line in steps if line.get(f"{GAP}/mean") is not None]
    return {
        "steps": len(steps),
        "reward_1": fmean(rewards[:third]),
        "reward_2": fmean(rewards[third:-third] or rewards),
        "reward_3": fmean(rewards[-third:]),
        "reward": fmean(rewards),
        "gap": average(f"{GAP}/mean"),
        "gap_first": render_gap(compared[0]) if compared else "none trained",
        "gap_last": render_gap(compared[-1]) if compared else "none trained",
        "update_ratio": average("polar/update_ratio"),
        "changed": average("polar/changed_weights"),
        "step_s": total / len(later),
        "rollouts": share("rollouts", "resampling"),
        "training": share("training", "optimizer"),
        "overhead": f"{fmean(line['polar/phase/overhead_share'] for line in later):.1%}",
        "sync_ms": 1000 * median(line.get("polar/phase/weight_sync_s") or 0.0 for line in later),
        "rows": average("polar/trajectories_per_rollout"),
        "seconds": run.ended - run.started,
    }


def compare_at_equal_time(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row what its run had come to when the shortest one of its seed and processes ended."""
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("log") and "error" not in row:
            groups.setdefault((row["seed"], row["processes"]), []).append(row)
    for group in groups.values():
        limit = min(sum(line["polar/phase/step_s"] for line in row["log"]) for row in group)
        for row in group:
            # rounding must not leave out the shortest run's own last step
            ends = [
                end for end in accumulate(line["polar/phase/step_s"] for line in row["log"]) if end <= limit + 1e-6
            ]
            rewards = [
                line["reward"]
                for line, end in zip(row["log"], ends, strict=False)
                if end > limit * 2 / 3 and line.get("reward") is not None
            ]
            row["equal_s"], row["equal_updates"] = limit, len(ends)
            row["equal_reward"] = fmean(rewards) if rewards else "no step ended"
            evaluations = [line for line in row.get("evaluations", ()) if 0 < line["step"] <= len(ends)]
            if evaluations:
                row["equal_held_out"] = fmean(line["eval_reward"] for line in evaluations)
                last = row["evaluations"][-1]
                row["held_out"], row["solved"] = last["eval_reward"], 100 * last["eval_pass_rate"]


def build_runs(args: argparse.Namespace, done: Sequence[Mapping[str, Any]]) -> list[Run]:
    """Those that have no row yet, by seed: a cut leaves whole seeds of all arms."""
    folder = args.out / f"{args.name}-{time.strftime('%H%M%S')}"
    runs = [
        Run(arm, seed, processes, folder / f"{arm}-seed{seed}-x{processes}", gpus=[])
        for processes in args.processes
        for seed in args.seeds
        for arm in args.arms
    ]
    return [run for run in runs if not any(run.who.items() <= row.items() for row in done)]


def average_seeds(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Average the reward of each step over the seeds of an arm, up to the shortest run."""
    curves: dict[str, list[list[float]]] = {}
    for row in rows:
        if row.get("log"):
            label = str(row["arm"]) + (f", {row['processes']} ranks" if row["processes"] > 1 else "")
            rewards = [line["reward"] for line in row["log"] if line.get("reward") is not None]
            curves.setdefault(label, []).append(rewards)
    return {label: [fmean(step) for step in zip(*runs, strict=False)] for label, runs in curves.items()}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--config", default="quickstart", help="run file of scripts/train.py")
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["bfloat16" if on_gpu else "float32"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", nargs="+", type=int, default=[1], help="ranks; every seed runs with each")
    parser.add_argument("--per_gpu", type=int, default=1, help="runs at the same time on each card")
    parser.add_argument("--stagger", type=float, default=8.0, help="seconds from one start to the next")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="runs are stopped after so many")
    parser.add_argument("--resume", type=Path, help="figures of a command before: its whole runs are taken from there")
    parser.add_argument("--name", default="learn", help="of the figures and the picture")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for them")
    parser.add_argument("rest", nargs="*", help="after --: flags for scripts/train.py")
    return parser


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    if num_gpus and max(args.processes) > num_gpus:
        parser.error(f"--processes {max(args.processes)} needs as many GPUs; this machine has {num_gpus}")
    done = [row for row in json.loads(args.resume.read_text())["rows"] if "error" not in row] if args.resume else []
    report = Report(args.name, args.out, COLUMNS)
    for row in done:
        report.add(**row)
    Queue(build_runs(args, done), args, report).work()
    rows = report.content["rows"]
    compare_at_equal_time(rows)
    rows.sort(key=lambda row: (list(ARMS).index(row["arm"]), row["processes"], row["seed"]))
    report.save()
    if any(row.get("log") for row in rows):
        title = f"{Path(args.config).stem}, {Path(args.model).name}, {report.content['machine']}"
        plot_rewards(average_seeds(rows), args.out / f"{args.name}.png", title=title)
    report.finish()


if __name__ == "__main__":
    main()
