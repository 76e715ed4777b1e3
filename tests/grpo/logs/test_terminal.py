"""Test what a run says on the terminal: lines of steps and evaluations, and the comparison at its end."""

import math
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from polar_trl.grpo.logs.evaluations import Evaluations, compare_evaluations, list_evaluations
from polar_trl.grpo.logs.terminal import StepLines, draw, format_duration, format_evaluation, format_step, say

STEP = {
    "reward": 0.40625,
    "reward_std": 0.3125,
    "frac_reward_zero_std": 0.25,
    "polar/sampled_tokens": 12345.0,
    "polar/trained_tokens": 987.0,
    "sampling/sampling_logp_difference/mean": 1.26e-6,
    "polar/phase/step_s": 12.34,
}


def test_a_step_is_one_line() -> None:
    assert format_step(3, 20, STEP, [0.0, 0.5, 0.40625], 205.0) == (
        "step  3/20  reward 0.406 ▁▅▄  spread 0.31, 75 % of groups differ  tokens 12,345 sampled, 987 trained  "
        "gap 1.3e-06  12.3 s  3 min left"
    )


def test_the_last_step_has_nothing_left_and_what_is_missing_is_none() -> None:
    line = format_step(20, 20, {"reward": None, "reward_std": math.nan, "polar/sampled_tokens": 7.0}, [], 0.0)
    assert line == (
        "step 20/20  reward none  spread none, none of groups differ  tokens 7 sampled, 0 trained  gap none  none s"
    )


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([0.0, 1.0], "▁█"), ([0.5, 0.5], "▅▅"), ([-1.0, 0.0, 1.0], "▁▅█"), ([0.0, 4.0, 2.0], "▁█▅")],
)
def test_bars_are_on_the_scale_from_0_to_1_or_beyond(values: list[float], bars: str) -> None:
    assert draw(values) == bars


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (89.4, "89 s"), (90.0, "2 min"), (3570.0, "1 h 0 min"), (12000.0, "3 h 20 min")],
)
def test_times_have_two_units_at_most(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def evaluate(rewards: list[tuple[str, float]], prefix: str = "eval_") -> dict[str, Any]:
    logs = {f"{prefix}runtime": 3.25, f"{prefix}reward": 0.5}
    evaluations = Evaluations()
    evaluations.note(rewards)
    logs.update(evaluations.take_figures(logs))
    assert evaluations.take_figures(logs)[f"{prefix}graded"] == 0  # an evaluation is counted once
    return logs


def test_an_evaluation_counts_what_it_solved_with_the_interval_of_wilson() -> None:
    logs = evaluate([(f"t{i}", 1.0 if i < 12 else 0.4) for i in range(48)])
    assert (logs["eval_graded"], logs["eval_solved"], logs["eval_pass_rate"]) == (48, 12, 0.25)
    assert format_evaluation(0, logs) == (
        "evaluation at step 0  solved 12 of 48 (25 %, 95 % interval 15-39 %)  reward 0.500  3.2 s"
    )
    assert evaluate([], "eval_hard_")["eval_hard_graded"] == 0


def test_training_takes_no_figures_of_an_evaluation() -> None:
    evaluations = Evaluations()
    evaluations.note([("a", 1.0)])
    assert evaluations.take_figures(STEP) == {} == evaluations.take_figures({"train_runtime": 3.0})
    assert evaluations.take_figures({"eval_runtime": 1.0})["eval_graded"] == 1


def test_the_first_and_the_last_evaluation_are_one_sentence() -> None:
    first, second, last = (
        evaluate([(f"t{i}", float(i < solved)) for i in range(48)]) | {"step": step}
        for step, solved in ((0, 12), (10, 30), (20, 40))
    )
    (sentence,) = compare_evaluations([first, STEP, second, last], kind="held-out")
    assert sentence == (
        "solved 12 of 48 held-out tasks before (25 %, 95 % interval 15-39 %) and 40 of 48 after "
        "(83 %, 95 % interval 70-91 %)"
    )
    assert [found["step"] for found in list_evaluations([first, STEP, second, last])] == [0, 10, 20]
    assert compare_evaluations([second]) == [
        "solved 30 of 48 evaluation tasks at step 10 (62 %, 95 % interval 48-75 %)"
    ]
    assert compare_evaluations([STEP]) == []


def test_sets_with_names_are_compared_apart() -> None:
    easy, hard = evaluate([("a", 1.0)], "eval_easy_"), evaluate([("b", 0.0)], "eval_hard_")
    of_easy, of_hard = compare_evaluations([easy, hard])
    assert of_easy.startswith("solved 1 of 1 evaluation tasks of easy before (100 %")
    assert of_hard.startswith("solved 0 of 1 evaluation tasks of hard before (0 %")
    assert evaluate([("a", 1.0), ("a", 0.0)])["eval_pass_rate"] == 0.5


def test_lines_are_those_of_rank_0_and_go_on_from_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    state = TrainerState(max_steps=4, global_step=2, log_history=[{"reward": 0.0}, {"reward": 1.0}])
    lines, control = StepLines("two tasks"), TrainerControl()
    lines.on_train_begin(None, state, control)
    state.global_step = 3
    lines.on_log(None, state, control, logs=STEP)
    lines.on_log(None, state, control, logs={"train_runtime": 3.0})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "4 steps, from step 2 on: two tasks"
    assert second.startswith("step 3/4  reward 0.406 ▁█▄  ")
    state.is_world_process_zero = False
    lines.on_log(None, state, control, logs=STEP)
    assert capsys.readouterr().out == ""


def test_a_terminal_without_the_letters_gets_the_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr("sys.stdout", out)
        say("reward ▁█")
    assert (tmp_path / "out").read_text() == "reward ??\n"
