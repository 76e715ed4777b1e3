"""Test how the best checkpoint is chosen and named."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.run.best import BestCheckpoint, find_best, name_best_metric


def evaluation(step: int, reward: float, prefix: str = "eval_") -> dict[str, Any]:
    solved = {"graded": 4, "solved": round(4 * reward), "pass_rate": reward}
    bounds = {"pass_rate_low": max(0.0, reward - 0.2), "pass_rate_high": min(1.0, reward + 0.2)}
    values = {"reward": reward, "runtime": 1.0} | solved | bounds
    return {"step": step, **{f"{prefix}{name}": value for name, value in values.items()}}


HISTORY = [evaluation(0, 0.9), evaluation(2, 0.25), evaluation(4, 0.75), evaluation(6, 0.75), evaluation(8, 0.5)]


def config(**keys: Any) -> PolarGRPOConfig:
    return PolarGRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **keys)


def test_the_first_of_equal_evaluations_after_the_start_is_the_best(tmp_path: Path) -> None:
    best = find_best(HISTORY, tmp_path, metric="reward", greater_is_better=True)
    assert best is not None
    assert (best["step"], best["metric"], best["value"], best["checkpoint"]) == (4, "eval_reward", 0.75, None)
    assert (best["solved"], best["pass_rate_low"]) == (3, 0.55)
    (tmp_path / "checkpoint-4").mkdir()
    least = find_best(HISTORY, tmp_path, metric="eval_pass_rate", greater_is_better=False)
    assert least is not None and least["step"] == 2
    best = find_best(HISTORY, tmp_path, metric="reward", greater_is_better=True)
    assert best is not None and best["checkpoint"] == "checkpoint-4"
    unknown = [{"step": 2, "eval_reward": float("nan")}, {"step": 3, "reward": 1.0}]
    assert find_best(unknown, tmp_path, metric="reward", greater_is_better=True) is None
    assert find_best(HISTORY, tmp_path, metric=None, greater_is_better=None) is None


def test_of_several_sets_it_is_the_first_ones_metric_unless_one_is_named(tmp_path: Path) -> None:
    assert name_best_metric("reward", ["easy", "hard"]) == "easy_reward"
    assert name_best_metric("eval_hard_pass_rate", ["easy", "hard"]) == "hard_pass_rate"
    assert name_best_metric("easy_reward", ["easy", "hard"]) == "easy_reward"
    args, sets = config(eval_strategy="steps", eval_steps=2), {"easy": None, "hard": None}
    BestCheckpoint(tmp_path, sets).on_train_begin(args, TrainerState(), TrainerControl())
    assert args.metric_for_best_model == "easy_reward"
    history = [
        {**evaluation(step, easy, "eval_easy_"), **evaluation(step, hard, "eval_hard_")}
        for step, easy, hard in ((2, 1.0, 0.0), (4, 0.5, 0.25))
    ]
    best = find_best(history, tmp_path, metric="hard_reward", greater_is_better=True)
    assert best is not None and (best["step"], best["set"], best["pass_rate"]) == (4, "hard", 0.25)


def test_best_json_follows_the_checkpoints(tmp_path: Path) -> None:
    args = config(eval_strategy="steps", eval_steps=2)
    callback, state = BestCheckpoint(tmp_path), TrainerState(log_history=HISTORY[:2], is_world_process_zero=False)
    callback.on_save(args, state, TrainerControl())
    assert not (tmp_path / "best.json").exists()  # another rank writes it
    state.is_world_process_zero = True
    for count, step in ((2, 2), (3, 4), (5, 4)):
        (tmp_path / f"checkpoint-{HISTORY[count - 1]['step']}").mkdir()
        state.log_history = HISTORY[:count]
        callback.on_save(args, state, TrainerControl())
        best = json.loads((tmp_path / "best.json").read_text())
        assert (best["checkpoint"], best["step"]) == (f"checkpoint-{step}", step)


@pytest.mark.parametrize(
    ("keys", "metric", "greater"),
    [
        ({}, None, None),
        ({"eval_strategy": "steps", "eval_steps": 2}, "reward", True),
        ({"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}, "loss", False),
        ({"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau"}, "loss", False),
        ({"eval_strategy": "epoch", "metric_for_best_model": "pass_rate"}, "pass_rate", True),
    ],
)
def test_a_run_that_evaluates_looks_for_the_best_reward(
    keys: dict[str, Any], metric: str | None, greater: bool | None
) -> None:
    args = config(**keys)
    assert (args.metric_for_best_model, args.greater_is_better) == (metric, greater)
