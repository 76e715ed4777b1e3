"""Train with everything in TRL's own form: `stock_worker.py MODEL REWARD_MODEL OUT`. Writes OUT/result.json.

A data set with a `prompt` column and columns of its own, two evaluation sets, four reward functions (a callable, an
async one, a dotted path, a reward model) with weights, a reference model that follows, and the best model at the end.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from worker_common import AGENT, CPU_SETTINGS

from polar_trl import PolarGRPOConfig, PolarGRPOTrainer, ShellHarness

seen: dict[str, Any] = {}


def length(
    prompts: list[str], completions: list[str], level: list[int], answer: list[str], **rest: Any
) -> list[float]:
    """What TRL's documentation has as its first example, with columns of the data set."""
    seen.setdefault("kinds", sorted({type(value).__name__ for value in (*prompts, *completions)}))
    seen.setdefault("columns", [level, answer])
    seen.setdefault("metadata", dict(rest["task"][0].metadata))
    rest["log_metric"]("longest", max(map(len, completions)))
    return [float(len(set(completion)) % 7) for completion in completions]


async def later(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(set(ids)) / 10 for ids in completion_ids]


def build_set(name: str, count: int) -> Dataset:
    return Dataset.from_list(
        [{"prompt": f"task {i}: ok", "level": i % 2, "answer": f"{name}{i}"} for i in range(count)]
    )


model, reward_model, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
trainer = PolarGRPOTrainer(
    model,
    [length, later, "dotted_rewards.constant", reward_model],
    PolarGRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=1,
        num_generations=4,
        num_generations_eval=2,
        max_steps=3,
        max_completion_length=12,
        learning_rate=1e-3,
        vllm_max_model_length=512,
        max_agents=4,
        reward_weights=[1.0, 0.5, 0.0, 0.25],
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=1,
        ref_model_mixup_alpha=1.0,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_hard_reward",
        log_completions=True,
        **CPU_SETTINGS,
    ),
    build_set("train", 4),
    {"easy": build_set("easy", 2), "hard": build_set("hard", 2)},
    harness=ShellHarness("python3 -I -S ~/agent.py {instruction}", files={"agent.py": AGENT.read_text()}),
)
before = [weight.clone() for weight in trainer.ref_model.parameters()]
trainer.train()
moved = max((a - b).abs().max().item() for a, b in zip(before, trainer.ref_model.parameters(), strict=True))
best = Path(trainer.state.best_model_checkpoint)
from safetensors.torch import load_file  # noqa: E402 - after vLLM

saved = load_file(best / "model.safetensors")
now = trainer.accelerator.unwrap_model(trainer.model).state_dict()
others = trainer.evaluate(build_set("other", 2), metric_key_prefix="eval_other")
trainer.close()
result = {
    **seen,
    "names": trainer.rewards.names,
    "log": trainer.state.log_history,
    "reference_moved": moved,
    "best": best.name,
    "is_best": all(torch.equal(saved[name], now[name]) for name in saved),
    "others": others,
}
(out / "result.json").write_text(json.dumps(result, default=str))
