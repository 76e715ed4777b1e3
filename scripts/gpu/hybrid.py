#!/usr/bin/env python3
"""Train and sample Qwen3.5's published class, tiny and random, in one process; print the gap of every step.

  bash scripts/gpu/run.sh hybrid --model .cache/models/SmolLM2-135M-Instruct     # takes its tokenizer and template
  bash scripts/gpu/run.sh hybrid --model MODEL --head-dim 256 --graphs none --runs full
  bash scripts/gpu/run.sh hybrid --model MODEL --tiny --steps 3 --lora-steps 2   # on a CPU

Runs `PolarGRPOTrainer` with the quickstart's agent, whose sessions have two calls, in a process per run: all weights
of the language model with the layout "tree", then an adapter. The model's text is noise, so the reward is the share of
sampled token ids that are even, which differs between rollouts and can be learned. The engine sleeps at level 2.

The control: the last step's samples scored again with the weights after its update (what the gap would be, had one
push failed) and with the first weights (had none arrived). The run fails where the true gap is not far below.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from fla_tuning import limit_tuning
from peft import LoraConfig
from report import Report
from tiny_hybrid import build_tiny_hybrid
from torch import Tensor
from training_runs import GAP, render_gap
from transformers import Qwen3_5ForConditionalGeneration, TrainerCallback

from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.trainer import PolarGRPOTrainer
from polar_trl.harness.shell import ShellHarness
from polar_trl.run_folder import read_log
from polar_trl.tasks.load import load_task_set

COLUMNS = {
    "run": "trained",
    "layout": "layout",
    "steps": "steps",
    "weights": "weights trained",
    "reward": "reward, first and last quarter",
    "gap_first": "gap mean / p99 / max, first step (nats)",
    "gap_last": "last step",
    "gap_one_missed": "had its push failed",
    "gap_never": "had no push arrived",
    "step_s": "s/step",
    "push_ms": "push (ms)",
    "seconds": "seconds in all",
}
CONTROL = "control.json"
NEEDED_RATIO = 3.0
"""At least how many times the last step's mean gap the gap without any push is, for a run to pass."""


def even_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of a rollout's sampled token ids that are even."""
    return [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) for ids in completion_ids]


# In the process of a run.


class StepPrinter(TrainerCallback):
    """A line per step, at once."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and f"{GAP}/mean" in logs:
            step_s = logs.get("polar/phase/step_s", float("nan"))
            print(
                f"  step {state.global_step}: gap {render_gap(logs)}, reward {logs['reward']:.3f}, "
                f"{step_s:.2f} s, grad norm {logs.get('grad_norm', 0.0):.3g}",
                flush=True,
            )


def build_config(args: argparse.Namespace) -> PolarGRPOConfig:
    on_gpu = torch.cuda.is_available()
    is_full = args.child == "full"
    return PolarGRPOConfig(
        output_dir=str(args.out),
        max_steps=args.steps if is_full else args.lora_steps,
        learning_rate=args.lr if is_full else args.lora_lr,
        lr_scheduler_type="constant",
        per_device_train_batch_size=8 if args.tiny else 32,
        num_generations=8,
        max_completion_length=16 if args.tiny else 64,
        max_session_calls=2,
        vllm_max_model_length=1024,
        vllm_gpu_memory_utilization=0.3,
        vllm_enable_sleep_mode=on_gpu,
        engine_cuda_graphs=args.graphs,
        sequence_layout="tree" if is_full else None,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=True,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        show_rollout_progress=False,
        seed=1,
    )


def train(args: argparse.Namespace) -> None:
    """One run: trains, then writes the control's figures to `args.out`."""
    adapter = None if args.child == "full" else LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    trainer = PolarGRPOTrainer(
        model=str(args.checkpoint),
        args=build_config(args),
        train_dataset=load_task_set("polar_trl/configs/tasks/shell_ladder.jsonl"),
        harness=ShellHarness(
            "python3 -I -S ~/shell_agent.py --max-turns 2 -- {instruction}",
            files={"shell_agent.py": Path("polar_trl/configs/agents/shell_agent.py").read_text()},
        ),
        reward_funcs=[even_ids],
        peft_config=adapter,
        callbacks=[StepPrinter()],
    )
    limit_tuning(1)  # minutes otherwise, in every process
    trained = {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    if stray := [name for name in trained if "visual" in name]:
        raise RuntimeError(f"the vision tower would be trained: {stray[0]}")
    first = {name: weight.detach().cpu().clone() for name, weight in trained.items()}
    trainer.train()
    control: dict[str, Any] = {
        "layout": trainer.layout_kind,
        "weights": sum(weight.numel() for weight in trained.values()),
        "processing_class": type(trainer.processing_class).__name__,
        "cudagraph_mode": trainer.vllm_generation.cudagraph_mode,
        "largest_change": max((trained[n].detach().cpu() - w).abs().max().item() for n, w in first.items()),
        "gap_one_missed": measure_gap(trainer),
    }
    trainer.save_model(str(args.out / "saved"))
    if adapter is None:
        control["saved_as_trained"] = is_saved(trainer.model, args.out / "saved")
    with torch.no_grad():
        for name, weight in trained.items():
            weight.copy_(first[name])
    control["gap_never"] = measure_gap(trainer)
    (args.out / CONTROL).write_text(json.dumps(control))
    trainer.close()


@torch.no_grad()
def measure_gap(trainer: PolarGRPOTrainer) -> dict[str, float]:
    """The last step's sampled tokens under the model's present weights against the engine's log-probabilities."""
    assert trainer.step.windows
    gaps: list[Tensor] = []
    for window in trainer.step.windows:
        for batch in window:
            logps_BT, _ = trainer._score(trainer.model, batch)
            gaps.append((logps_BT - batch["sampling_per_token_logps"])[batch["completion_mask"].bool()].abs().float())
    gap = torch.cat(gaps)
    figures = {"mean": gap.mean(), "p99": gap.quantile(0.99), "max": gap.max()}
    return {f"{GAP}/{name}": value.item() for name, value in figures.items()}


def is_saved(model: Any, folder: Path) -> bool:
    """Tell whether the folder loads again as a multimodal model with the same weights."""
    # not the Auto class: vLLM, once it has built an engine, lets that make configurations of vLLM's own
    saved = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    loaded = dict(saved.named_parameters())
    pairs = [(weight.detach().cpu().float(), loaded[name]) for name, weight in model.named_parameters()]
    return len(pairs) == len(loaded) and all(torch.equal(a, b) for a, b in pairs)


# In the process that reports.


def run(name: str, args: argparse.Namespace, checkpoint: Path, folder: Path, report: Report) -> None:
    """Start a run, wait for it, and add its row."""
    flags = ["--child", name, "--checkpoint", str(checkpoint), "--out", str(folder), "--model", str(args.model)]
    for key in ("steps", "lora_steps", "lr", "lora_lr", "graphs"):
        flags += [f"--{key.replace('_', '-')}", str(getattr(args, key))]
    flags += ["--tiny"] if args.tiny else []
    folder.mkdir(parents=True)
    report.say(f"{name}: starts")
    started = time.monotonic()
    try:
        subprocess.run([sys.executable, __file__, *flags], check=True, timeout=args.limit)
        problem = ""
    except subprocess.TimeoutExpired:
        problem = f"stopped after {args.limit:g} s"
    except subprocess.CalledProcessError as error:
        problem = f"ended with {error.returncode}; its last lines are above"
    seconds = time.monotonic() - started
    steps = [line for line in read_log(folder) if f"{GAP}/mean" in line]
    control = json.loads((folder / CONTROL).read_text()) if (folder / CONTROL).exists() else {}
    row = {"run": name, "seconds": seconds, **describe(steps, control)}
    if not problem and control["gap_never"][f"{GAP}/mean"] < NEEDED_RATIO * steps[-1][f"{GAP}/mean"]:
        problem = "the gap of the last step is not far below that of an engine without pushes"
    if not problem and control.get("saved_as_trained") is False:
        problem = "the saved model is not the trained one"
    if problem:
        report.fail(RuntimeError(problem), **row, log=steps)
    else:
        report.add(**row, log=steps)


def describe(steps: Sequence[dict[str, Any]], control: dict[str, Any]) -> dict[str, Any]:
    """Figures of a run. Times leave out the first two steps, in which kernels compile."""
    row: dict[str, Any] = {"steps": len(steps)}
    if steps:
        rewards = [line["reward"] for line in steps]
        quarter = max(1, len(rewards) // 4)
        later = steps[2:] or steps
        row |= {
            "reward": f"{fmean(rewards[:quarter]):.3f}, {fmean(rewards[-quarter:]):.3f}",
            "gap_first": render_gap(steps[0]),
            "gap_last": render_gap(steps[-1]),
            "step_s": median(line["polar/phase/step_s"] for line in later),
            "push_ms": 1000 * median(line.get("polar/phase/weight_sync_s") or 0.0 for line in later),
        }
    for name, value in control.items():
        row[name] = render_gap(value) if name.startswith("gap") else value
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder whose tokenizer and chat template are taken")
    parser.add_argument("--runs", nargs="+", choices=("full", "lora"), default=["full", "lora"])
    parser.add_argument("--steps", type=int, default=20, help="of the run that trains all weights")
    parser.add_argument("--lora-steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--lora-lr", type=float, default=5e-3)
    parser.add_argument("--head-dim", type=int, default=128, help="of full attention (default: %(default)s)")
    parser.add_argument("--graphs", default="decode", help="engine_cuda_graphs (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="smaller sizes and batches, for a CPU")
    parser.add_argument("--limit", type=float, default=330.0, help="seconds for each run (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for figures and run folders")
    parser.add_argument("--child", choices=("full", "lora"), help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        train(args)
        return
    report = Report("hybrid", args.out, COLUMNS)
    folder = args.out / f"hybrid-{time.strftime('%H%M%S')}"
    sizes = {"hidden_size": 64, "num_layers": 2, "delta_head_dim": 64} if args.tiny else {}
    checkpoint = build_tiny_hybrid(args.model, folder / "checkpoint", head_dim=args.head_dim, **sizes)
    report.note(config=json.loads((checkpoint / "config.json").read_text()))
    for name in args.runs:
        run(name, args, checkpoint, folder / name, report)
    report.finish()


if __name__ == "__main__":
    main()
