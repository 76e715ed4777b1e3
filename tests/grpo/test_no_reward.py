"""Test rollouts without a reward: no function stands in for a failure, and TRL's warning stays out of the log."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from trl.trainer.grpo_trainer import logger as trl_logger

from polar_trl.grpo.trainer import PolarGRPOTrainer
from polar_trl.types import Rollout


class Rewards(PolarGRPOTrainer):
    """A trainer with as much as TRL's `_calculate_rewards` reads."""

    def __init__(self, reward_func: Any) -> None:
        self.accelerator = Accelerator(cpu=True)
        self.args = self.state = SimpleNamespace(report_to=[], global_step=0)
        self.reward_funcs, self.reward_processing_classes, self.reward_func_names = [reward_func], [None], ["grader"]
        self.environments = self.completions_table = None
        self._pending_extra_logs: Any = {}


def test_only_the_warning_of_a_missing_reward_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def reward(rollouts: list[Rollout], **_: Any) -> list[float | None]:
        trl_logger.warning("another warning")
        return [rollout.reward for rollout in rollouts]

    failed = Rollout(id="r", task_id="t", group_id="g", calls=(), error="the sandbox broke")
    trainer = Rewards(reward)
    row: dict[str, Any] = {"prompt": "x"}
    rewards_RF = trainer._compute_rewards([row], [SimpleNamespace(rollout=failed)], ["y"])  # type: ignore[list-item]
    assert torch.isnan(rewards_RF).all()
    assert [record.getMessage() for record in caplog.records] == ["[RANK 0] another warning"]
    trainer._calculate_rewards([row | {"rollouts": failed}], ["x"], ["y"], [[]])  # TRL's own trainer still says it
    assert "All reward functions returned None" in caplog.records[-1].getMessage()


def test_a_reward_function_does_not_stand_in_for_a_failure() -> None:
    """Law 4, with a reward function that has a number for every rollout."""
    failed = Rollout(id="r0", task_id="t", group_id="g", calls=(), error="the grader broke")
    healthy = Rollout(id="r1", task_id="t", group_id="g", calls=(), reward=1.0)
    trainer = Rewards(lambda rollouts, **_: [0.5] * len(rollouts))
    results = [SimpleNamespace(rollout=rollout) for rollout in (failed, healthy)]
    rewards_RF = trainer._compute_rewards([{"prompt": "x"}] * 2, results, ["y"] * 2)  # type: ignore[arg-type]
    assert torch.isnan(rewards_RF[0]).all() and rewards_RF[1].tolist() == [0.5]
