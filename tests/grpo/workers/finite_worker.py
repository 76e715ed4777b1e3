"""Train a run in which rewards and log-probabilities are no numbers: `finite_worker.py MODEL OUT MAX_STEPS`.

A task's behaviour is what a reward function gives for the first rollout of its group, or what the grader gives for all
of them; the last rank's engine gives some completions log-probabilities that are none, and its loss is NaN in the last
step. Writes OUT/rank-R.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from worker_common import AGENT, CPU_SETTINGS, build_tasks, grade

import polar_trl.engine.vllm
from polar_trl.grade.function import FunctionGrader
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.trainer import PolarGRPOTrainer
from polar_trl.harness.shell import ShellHarness
from polar_trl.sandbox.base import Sandbox
from polar_trl.types import Rollout, Task

BEHAVIOURS = ("inf", "-inf", "nan", "abstain", "beyond_float32", "beyond_float", "grader_nan", "async_nan")
GIVEN: dict[str, Any] = {
    "inf": torch.tensor(float("inf")),
    "-inf": float("-inf"),
    "nan": np.float32("nan"),
    "abstain": None,
    "beyond_float32": 1e39,
    "beyond_float": 10**400,
}
LOGPROBS = {4: (float("nan"),), 9: (0.5,), 14: (float("-inf"),), 19: ()}
"""By number of the completion: what stands in the place of the last log-probability."""


def judge(task: Task, sandbox: Sandbox) -> float:
    return float("nan") if task.metadata["behaviour"] == "grader_nan" else grade(task, sandbox)


def pick(rollouts: list[Rollout], given: dict[str, Any], otherwise: float | None) -> list[Any]:
    """A bad value for the first rollout of a group."""
    kinds = [rollout.task_id.split("-", 1)[1] for rollout in rollouts]
    firsts = [rollout.id.endswith("r000") for rollout in rollouts]
    return [given.get(kind, otherwise) if first else otherwise for kind, first in zip(kinds, firsts, strict=True)]


def extra(rollouts: list[Rollout], **_: Any) -> list[Any]:
    return pick(rollouts, GIVEN, 0.0)


async def slow(rollouts: list[Rollout], **_: Any) -> list[Any]:
    return pick(rollouts, {"async_nan": float("nan")}, None)


class NanAtTheEnd(PolarGRPOTrainer):
    def _score(self, model: Any, micro_batch: Any) -> Any:
        logps, entropies = super()._score(model, micro_batch)
        is_last_rank = self.accelerator.process_index == self.accelerator.num_processes - 1
        is_time = is_last_rank and self.state.global_step == self.args.max_steps - 1
        return logps * torch.nan if is_time else logps, entropies


def spoil_engine() -> None:
    """The patched function is what every completion of the engine's passes."""
    take, number = polar_trl.engine.vllm._take_logprobs, 0

    def take_bad(flat: Any, token_ids: Any) -> tuple[float, ...]:
        nonlocal number
        number += 1
        logprobs = take(flat, token_ids)
        return logprobs[:-1] + LOGPROBS[number] if number in LOGPROBS else logprobs

    polar_trl.engine.vllm._take_logprobs = take_bad


model, out, max_steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
trainer = NanAtTheEnd(
    model=model,
    args=PolarGRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_steps=max_steps,
        max_completion_length=12,
        learning_rate=1e-3,
        vllm_max_model_length=512,
        max_agents=4,
        save_strategy="no",
        shuffle_dataset=False,
        **CPU_SETTINGS,
    ),
    train_dataset=build_tasks(list(BEHAVIOURS)),
    harness=ShellHarness("python3 -I -S ~/agent.py {instruction}", files={"agent.py": AGENT.read_text()}),
    grader=FunctionGrader(judge),
    reward_funcs=[extra, slow],
)
if trainer.accelerator.process_index == trainer.accelerator.num_processes - 1:
    trainer.engine_sync.check_once("train")  # whose completions are not counted
    spoil_engine()
trainer.train()
trainer.close()
weights = torch.cat([p.detach().flatten() for p in trainer.accelerator.unwrap_model(trainer.model).parameters()])
result = {
    "log": [entry for entry in trainer.state.log_history if "reward" in entry],
    "names": trainer.rewards.names,
    "is_finite": bool(torch.isfinite(weights).all()),
    "sum": weights.double().sum().item(),
}
(out / f"rank-{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
