"""Test how the best checkpoint is chosen and named."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from transformers import Trainer, TrainerControl, TrainerState

from polar_trl.errors import ConfigError
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.resume.resume import Resume
from polar_trl.grpo.run.best import BestCheckpoint, find_best, name_best_metric, write_best
from polar_trl.grpo.run.finish import finish_run


def evaluation(step: int, reward: float, prefix: str = "eval_") -> dict[str, Any]:
    solved = {"graded": 4, "solved": round(4 * reward), "pass_rate": reward}
    bounds = {"pass_rate_low": max(0.0, reward - 0.2), "pass_rate_high": min(1.0, reward + 0.2)}
    values = {"reward": reward, "runtime": 1.0} | solved | bounds
    return {"step": step, **{f"{prefix}{name}": value for name, value in values.items()}}


HISTORY = [evaluation(0, 0.9), evaluation(2, 0.25), evaluation(4, 0.75), evaluation(6, 0.75), evaluation(8, 0.5)]


def config(**keys: Any) -> PolarGRPOConfig:
    return PolarGRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **keys)


def test_the_first_of_equal_evaluations_after_the_start_is_the_best(tmp_path: Path) -> None:
    args = config(metric_for_best_model="reward")
    best = find_best(HISTORY, tmp_path, args)
    assert best is not None
    assert (best["step"], best["metric"], best["value"], best["checkpoint"]) == (4, "eval_reward", 0.75, None)
    assert (best["solved"], best["pass_rate_low"]) == (3, 0.55)
    least = find_best(HISTORY, tmp_path, config(metric_for_best_model="eval_pass_rate", greater_is_better=False))
    assert least is not None and least["step"] == 2
    for step in (4, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()
    best = find_best(HISTORY, tmp_path, args)
    assert best is not None and best["checkpoint"] == "checkpoint-4"
    unknown = [{"step": 2, "eval_reward": float("nan")}, {"step": 3, "reward": 1.0}]
    assert find_best(unknown, tmp_path, args) is None
    assert find_best(HISTORY, tmp_path, config()) is None


def test_where_runs_evaluate_more_often_than_they_save_it_is_the_best_that_was_saved(tmp_path: Path) -> None:
    for step in (2, 8):
        (tmp_path / f"checkpoint-{step}").mkdir()
    best = find_best(HISTORY, tmp_path, config(metric_for_best_model="reward"))
    assert best is not None and (best["checkpoint"], best["value"]) == ("checkpoint-8", 0.5)


def test_of_several_sets_it_is_the_first_ones_metric_unless_one_is_named(tmp_path: Path) -> None:
    assert name_best_metric("reward", ["easy", "hard"]) == "easy_reward"
    assert name_best_metric("eval_hard_pass_rate", ["easy", "hard"]) == "hard_pass_rate"
    assert name_best_metric("easy_reward", ["easy", "hard"]) == "easy_reward"
    args, sets = config(eval_strategy="steps", eval_steps=2), {"easy": None, "hard": None}
    BestCheckpoint(tmp_path, sets).on_train_begin(args, TrainerState(), TrainerControl())
    assert args.metric_for_best_model == "easy_reward"
    history = [
        {**evaluation(step, easy, "eval_easy_"), **evaluation(step, hard, "eval_easy_too_")}
        for step, easy, hard in ((2, 1.0, 0.0), (4, 0.5, 0.25))
    ]
    best = find_best(history, tmp_path, config(metric_for_best_model="easy_too_reward"))
    assert best is not None and (best["step"], best["set"], best["pass_rate"]) == (4, "easy_too", 0.25)


def test_best_json_follows_the_checkpoints(tmp_path: Path) -> None:
    args = config(eval_strategy="steps", eval_steps=2)
    callback, state = BestCheckpoint(tmp_path), TrainerState(log_history=HISTORY[:2], is_world_process_zero=False)
    callback.on_save(args, state, TrainerControl())
    assert not (tmp_path / "best.json").exists()  # another rank writes it
    state.is_world_process_zero = True
    callback.on_save(args, state, TrainerControl())
    assert not (tmp_path / "best.json").exists()  # there is no checkpoint
    for count, step in ((2, 2), (3, 4), (5, 4)):
        (tmp_path / f"checkpoint-{HISTORY[count - 1]['step']}").mkdir()
        state.log_history = HISTORY[:count]
        callback.on_save(args, state, TrainerControl())
        best = json.loads((tmp_path / "best.json").read_text())
        assert (best["checkpoint"], best["step"]) == (f"checkpoint-{step}", step)


def test_the_best_that_was_saved_outlives_the_limit(tmp_path: Path) -> None:
    """An evaluation that is better still, at a step without a checkpoint, is none to keep."""
    args = config(metric_for_best_model="reward", save_total_limit=1)
    args.output_dir = str(tmp_path)
    state, runner = TrainerState(epoch=0.0), SimpleNamespace(harness=None)
    rollouts = SimpleNamespace(carry_over=None, tasks={"train": {}}, num_batches=0, runner=runner)
    resume = Resume(
        args=args,
        accelerator=Accelerator(cpu=True),
        trl=SimpleNamespace(state=state, output_dir=lambda trial: str(tmp_path), micro_step=0),
        layout_kind="packed",
        step=SimpleNamespace(windows=None),
        rollouts=rollouts,
        engine=SimpleNamespace(policy_version=0),
        policy_weights=SimpleNamespace(rounded=None),
        is_used=False,
    )
    history = [evaluation(step, reward) for step, reward in ((2, 0.5), (3, 0.9), (4, 0.6), (6, 0.4), (8, 0.3))]
    for count in (1, 3, 4, 5):
        state.log_history, state.global_step = history[:count], history[count - 1]["step"]
        resume.save(None, lambda: None)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]
    assert state.best_model_checkpoint == str(tmp_path / "checkpoint-4")


def test_an_evaluation_at_the_end_of_a_run_counts(tmp_path: Path) -> None:
    args = config(metric_for_best_model="reward")
    for step in (4, 8):
        (tmp_path / f"checkpoint-{step}").mkdir()
    write_best(HISTORY[:-1], tmp_path, args)
    history = [{"step": 1, "reward": 0.5, "polar/sampled_tokens": 1}, *HISTORY[:-1], evaluation(8, 1.0)]
    finish_run(tmp_path, history, args, seconds=1.0, is_saved=True, is_held_out=True)
    best = json.loads((tmp_path / "best.json").read_text())
    assert best["checkpoint"] == "checkpoint-8" and json.loads((tmp_path / "summary.json").read_text())["best"] == best


@pytest.mark.parametrize("metric", ["reward", "pass_rate"])
def test_an_evaluation_without_a_graded_session_is_not_the_best(tmp_path: Path, metric: str) -> None:
    args = config(eval_strategy="steps", eval_steps=2, metric_for_best_model=metric)
    trainer, metrics = SimpleNamespace(args=args, state=TrainerState()), {"eval_reward": None, "eval_runtime": 1.0}
    BestCheckpoint(tmp_path).on_evaluate(args, trainer.state, TrainerControl(), metrics=metrics)
    assert not Trainer._determine_best_metric(trainer, metrics, None)
    assert trainer.state.best_global_step is None


def test_a_metric_that_no_evaluation_has_is_refused_by_the_set_that_would_have_it(tmp_path: Path) -> None:
    args, control = config(eval_strategy="steps", eval_steps=2, metric_for_best_model="rewrad"), TrainerControl()
    message = "metric_for_best_model is 'rewrad', which no evaluation has; they have graded, pass_rate, "
    with pytest.raises(ConfigError, match=message):
        BestCheckpoint(tmp_path).on_evaluate(args, TrainerState(), control, metrics=evaluation(2, 0.5))
    args.metric_for_best_model = "easy_too_rewrad"
    callback = BestCheckpoint(tmp_path, {"easy": None, "easy_too": None})
    callback.on_evaluate(args, TrainerState(), control, metrics=evaluation(2, 0.5, "eval_easy_"))
    with pytest.raises(ConfigError, match="easy_too_rewrad"):
        callback.on_evaluate(args, TrainerState(), control, metrics=evaluation(2, 0.5, "eval_easy_too_"))


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


@pytest.mark.parametrize(("loads_best", "evaluated"), [(True, False), (False, True)])
def test_a_best_model_that_was_loaded_is_not_evaluated_as_the_last_steps(
    tmp_path: Path, loads_best: bool, evaluated: bool
) -> None:
    from polar_trl.grpo.trainer import PolarGRPOTrainer

    calls: list[str] = []
    trainer = SimpleNamespace(
        args=SimpleNamespace(eval_on_start=True, load_best_model_at_end=loads_best, save_strategy="steps"),
        state=SimpleNamespace(log_history=[], global_step=7, best_model_checkpoint=str(tmp_path / "checkpoint-6")),
        eval_dataset=[{}],
        evaluate=lambda: calls.append("evaluate"),
        save_model=lambda: calls.append("save"),
        accelerator=SimpleNamespace(is_main_process=False),
    )
    PolarGRPOTrainer._finish(trainer, tmp_path)  # type: ignore[arg-type]
    assert calls == ["evaluate", "save"][not evaluated :]
