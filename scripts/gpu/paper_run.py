#!/usr/bin/env python3
"""Run the paper's LoRA file with real Pi processes on a random model of Qwen3.5-4B's sizes; compare it with `plan`.

  bash scripts/gpu/run.sh paper_run --tokenizer MODEL                     # ten steps of 4 tasks x 16 rollouts
  bash scripts/gpu/run.sh paper_run --tokenizer MODEL --tiny --steps 2    # a rehearsal on a CPU

`polar-trl train swe_1gpu` as it stands, but for what is printed as "changed". A random model calls no tool, so each
session is Pi started again and again on the same conversation (`pi -p --continue`), with the result of a tool that it
did not call as the next message. Rewards are drawn from the sampled ids.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from fla_tuning import limit_tuning
from model_sizes import QWEN35_4B, VOCABULARY
from report import Report
from tiny_hybrid import build_tiny_hybrid
from training_runs import GAP, render_gap

from polar_trl.cli.train import main as train_main
from polar_trl.harness.base import Launch
from polar_trl.harness.pi import PiHarness
from polar_trl.types import Endpoint, Task

COLUMNS = {
    "step": "step",
    "calls": "calls a session",
    "sampled": "sampled tokens",
    "forwarded": "forwarded tokens",
    "step_s": "s",
    "rollouts_s": "rollouts",
    "training_s": "training",
    "sync_s": "push",
    "gap": "gap mean / p99 / max (nats)",
    "reward": "reward",
    "unrewarded": "sessions without a reward",
    "prompt_cached": "prompt tokens cached",
}
SESSIONS = '--session-dir "$HOME/.polar/sessions"'
WORDS = ("the", "of", "to", "and", "in", "is", "for", "on", "with", "file", "line", "test", "code", "value", "error")


class ContinuedPi(PiHarness):
    """Pi, told a made-up result of a tool after each of its answers.

    Args:
        num_results: How many.
        result_words: Words of each.
    """

    def __init__(self, *, num_results: int, result_words: int) -> None:
        super().__init__()
        self._num_results, self._result_words = num_results, result_words

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        launch = super().build_launch(task, endpoint)
        once = launch.command.replace("--no-session", SESSIONS).replace("exec ", "")
        draw = random.Random(task.id)
        commands, files = [once], dict(launch.files)
        for number in range(self._num_results):
            name = f".polar/result_{number}.txt"
            files[name] = " ".join(draw.choice(WORDS) for _ in range(self._result_words))
            begin, _, _ = once.partition("<")
            commands.append(f'{begin} --continue <"$HOME/{name}"')
        return replace(launch, command="\n".join(commands), files=files)


def reward(rollouts: list[Any], **_: Any) -> list[float]:
    """Noise that depends on what was sampled: groups have variance, and there is a gradient."""
    return [sum(sum(call.completion.token_ids) for call in rollout.calls) % 97 / 97 for rollout in rollouts]


def list_changes(args: argparse.Namespace) -> list[str]:
    """What differs from the run file, as flags of `polar-trl train`."""
    folder = args.folder
    changed = {
        "model_name_or_path": folder / "model",
        "tasks": folder / "tasks.jsonl",
        "output_dir": folder / "run",
        "agent": "paper_run:ContinuedPi",
        "agent_options": json.dumps({"num_results": args.results, "result_words": args.result_words}),
        "reward_funcs": "paper_run.reward",
        "renderer": "template",  # SmolLM2's, whose tokenizer the model has
        "sandbox": "local",  # which enforces no limits
        "sandbox_memory_mb": 4096,
        "sandbox_disk_mb": 4096,
        "max_agents": args.agents,
        "max_completion_length": args.sampled,
        "max_steps": args.steps,
        "num_train_epochs": 1,
        "save_strategy": "no",
        "use_liger_kernel": str(torch.cuda.is_available()).lower(),
    }
    if args.tiny:
        changed |= {
            "use_cpu": "true",
            "bf16": "false",
            "model_init_kwargs": json.dumps({"dtype": "float32"}),
            "vllm_max_model_length": 8192,
            "vllm_enable_sleep_mode": "false",
            "max_tokens_per_device": 8192,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "optim": "adamw_torch",
        }
    return [f"--{name}={value}" for name, value in changed.items()]


def train(args: argparse.Namespace) -> None:
    """The run, in a process of its own."""
    if args.tuning:
        limit_tuning(args.tuning)
    train_main(["swe_1gpu", *list_changes(args)])


def make_inputs(args: argparse.Namespace) -> None:
    """The model's folder and the tasks."""
    if args.tiny:
        sizes: dict[str, Any] = {"hidden_size": 64, "num_layers": 2, "head_dim": 64, "delta_head_dim": 64}
    else:
        text = {
            name: size
            for name, size in QWEN35_4B.items()
            if name not in ("num_hidden_layers", "hidden_size", "head_dim")
        }
        sizes = {
            "hidden_size": QWEN35_4B["hidden_size"],
            "num_layers": QWEN35_4B["num_hidden_layers"],
            "head_dim": QWEN35_4B["head_dim"],
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "vocab_size": VOCABULARY["qwen3.5"],
            **text,
        }
    sizes["max_position_embeddings"] = 1 << 17
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    build_tiny_hybrid(Path(args.tokenizer), args.folder / "model", dtype=dtype, **sizes)
    draw = random.Random(0)
    tasks = [
        {"id": f"t{number}", "instruction": " ".join(draw.choice(WORDS) for _ in range(args.task_words))}
        for number in range(4 * args.steps + 4)
    ]
    (args.folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


def read_plan(args: argparse.Namespace) -> dict[str, Any]:
    """What `polar-trl plan` says of the same run on this card."""
    size = 80.0
    if torch.cuda.is_available():  # `--gpu` takes the size in the card's name, which is 2% more than it reports
        size = torch.cuda.get_device_properties(0).total_memory / (1 << 30) / 0.98
    command = [sys.executable, "-m", "polar_trl", "plan", "--config", "swe_1gpu", "--gpu", f"{size:.0f}GB", "--json"]
    command += [flag for flag in list_changes(args) if not flag.startswith(("--max_steps", "--use_cpu"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return {"error": (done.stderr.strip() or done.stdout.strip())[-500:]}


def describe(line: dict[str, Any], step: int) -> dict[str, Any]:
    """A row of the table."""
    find = line.get
    return {
        "step": step,
        "calls": find("polar/calls_per_rollout"),
        "sampled": find("polar/sampled_tokens"),
        "forwarded": find("polar/forwarded_tokens"),
        "step_s": find("polar/phase/step_s"),
        "rollouts_s": find("polar/phase/rollouts_s"),
        "training_s": find("polar/phase/training_s", 0.0) + find("polar/phase/optimizer_s", 0.0),
        "sync_s": find("polar/phase/weight_sync_s"),
        "gap": render_gap(line) if f"{GAP}/mean" in line else "",
        "reward": find("reward"),
        "unrewarded": find("polar/rollouts_without_reward"),
        "prompt_cached": find("polar/prompt_cached"),
        "log": line,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer with a chat template")
    parser.add_argument("--tiny", action="store_true", help="smaller sizes and batches, for a CPU")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--results", type=int, default=2, help="made-up results of a session, each one call more")
    parser.add_argument("--result-words", type=int, default=500)
    parser.add_argument("--task-words", type=int, default=400)
    parser.add_argument("--sampled", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--agents", type=int, default=48, help="at once")
    parser.add_argument("--tuning", type=int, default=1, help="configurations each Triton kernel tries; 0 for all")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for the run")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for figures")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return train(args)
    report = Report("paper_run", args.out, COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        run(args, report)
    report.finish()


def run(args: argparse.Namespace, report: Report) -> None:
    """Train in another process, and report each step when it has ended."""
    make_inputs(args)
    report.say("a random model is on the disk")
    report.note(changed=list_changes(args), plan=read_plan(args))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    log, seen = args.folder / "run" / "log.jsonl", 0
    with (args.out / "paper_run.txt").open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, __file__, "--child", "--folder", str(args.folder), *sys.argv[1:]],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        ends = time.monotonic() + args.limit
        peak = 0
        while child.poll() is None and time.monotonic() < ends:
            time.sleep(1)
            seen = add_steps(report, log, seen)
            if torch.cuda.is_available():
                peak = max(peak, torch.cuda.device_memory_used())
        if child.poll() is None:
            report.say("out of time")
            child.kill()
        code = child.wait()
    add_steps(report, log, seen)
    tail = (args.out / "paper_run.txt").read_text(errors="replace")[-3000:]
    later = report.content["rows"][1:]
    report.note(
        exit_code=code,
        peak_gb=peak / 1e9,
        mean_step_s=fmean(row["step_s"] for row in later) if later else None,
    )
    if code:
        print(tail, flush=True)
        report.fail(RuntimeError(f"the run ended with {code}"))
    print(json.dumps({key: report.content[key] for key in ("plan", "peak_gb", "mean_step_s")}), flush=True)


def add_steps(report: Report, log: Path, seen: int) -> int:
    """Add the steps that the run's log has beyond those seen."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []
    steps = [line for line in lines if "polar/phase/step_s" in line]
    for number, line in enumerate(steps[seen:], start=seen + 1):
        report.add(**describe(line, number))
    return len(steps)


if __name__ == "__main__":
    main()
