"""Metrics of rewards: one list per name, whoever logs under it."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from polar_trl.grpo.credit.advantage import compute_advantages
from polar_trl.grpo.logs.rollout_log import RolloutLog
from polar_trl.grpo.logs.trained_rows import TrainedRows
from polar_trl.grpo.trl_bridge import TrlBridge


def test_what_is_logged_under_one_name_is_averaged(tmp_path: Path) -> None:
    """Two reward functions of one name, and one that logs a metric called "reward"."""
    metrics: Any = {"train": defaultdict(list)}
    trl = TrlBridge(SimpleNamespace(_metrics=metrics, _pending_metrics={"reward": [9.0]}))
    rewards: Any = SimpleNamespace(names=["f", "f"])
    log = RolloutLog(trl, 0, rewards=rewards, trained_rows=TrainedRows(tmp_path, "run"), table=None)
    rewards_RF = torch.tensor([[0.0, 2.0], [1.0, 4.0]])
    advantages = compute_advantages(
        rewards_RF, torch.ones(2), num_generations=2, scale_rewards="group", aggregation="sum_then_normalize"
    )
    log.log_rewards(rewards_RF, advantages, "train")
    assert metrics["train"]["rewards/f/mean"] == [0.5, 3.0]
    assert metrics["train"]["reward"] == [3.5, 9.0]
