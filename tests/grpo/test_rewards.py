"""Rewards and log-probabilities that are no numbers: real runs on one rank and on two, and the wrapper by itself."""

import asyncio
import functools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from launch import run_worker
from records import read_session
from trl import GRPOTrainer
from trl.trainer.grpo_trainer import logger as trl_logger
from trl.trainer.utils import is_async_callable

from polar_trl.cli import main
from polar_trl.errors import ConfigError
from polar_trl.grade.command import CommandGrader
from polar_trl.grpo.reward_funcs import list_reward_functions
from polar_trl.grpo.rewards import Rewards, find_not_finite, mark_not_finite
from polar_trl.grpo.trl_bridge import TrlBridge
from polar_trl.types import Rollout, Task

BAD = ("inf", "-inf", "nan", "beyond_float32", "beyond_float", "async_nan")
HERE = re.escape(
    str(Path(__file__).relative_to(Path.cwd()) if Path(__file__).is_relative_to(Path.cwd()) else __file__)
)
Run = tuple[list[dict[str, Any]], dict[str, Rollout], Path]


@pytest.fixture(scope="module", params=[1, 2])
def run(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Results of each rank; rollouts by id; the folder."""
    out = tmp_path_factory.mktemp("finite")
    run_worker("finite_worker.py", str(tiny_model), str(out), str(4 // request.param), processes=request.param)
    ranks = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(request.param)]
    rollouts = {r.id: r for r in (read_session(path) for path in out.glob("sessions/**/*.jsonl"))}
    return ranks, rollouts, out


def read_lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in out.glob("rows/*/train_*.jsonl") for line in path.read_text().splitlines()]


def describe(out: Path) -> dict[str, dict[str, Any]]:
    """The line about each rollout."""
    return {line["rollout"]: line for line in read_lines(out) if line["type"] == "rollout"}


def kind(rollout: Rollout) -> str:
    return rollout.task_id.split("-", 1)[1]


def test_one_function_that_gives_no_number_leaves_no_reward(run: Run) -> None:
    ranks, rollouts, out = run
    lines = describe(out)
    assert len(rollouts) == len(lines) == 32
    spoiled = {name for name, r in rollouts.items() if r.error is None and name.endswith("r000") and kind(r) in BAD}
    assert len(spoiled) >= 4  # the engine may have failed some
    for name, rollout in rollouts.items():
        has_reward = rollout.error is None and name not in spoiled
        assert (lines[name]["reward"] is not None) == has_reward, name
        assert has_reward or (lines[name]["dropped"], lines[name]["advantage"]) == ("no_reward", 0.0)
    by_grader = sum(r.counters.get("rewards_not_finite", 0) for r in rollouts.values())
    assert by_grader == sum(kind(r) == "grader_nan" and not is_engines(r) for r in rollouts.values()) >= 3
    for rank in ranks:
        assert sum(entry["polar/rewards_not_finite"] for entry in rank["log"]) == len(spoiled) + by_grader
        without = sum(line["reward"] is None for line in lines.values())
        assert sum(entry["polar/rollouts_without_reward"] for entry in rank["log"]) == without
        assert rank["names"] == ["grader", "extra", "slow"]


def test_none_is_an_abstention(run: Run) -> None:
    _, rollouts, out = run
    abstained = [r for r in rollouts.values() if kind(r) == "abstain" and r.error is None]
    assert abstained
    for rollout in abstained:
        assert describe(out)[rollout.id]["reward"] == pytest.approx(rollout.reward)


def is_engines(rollout: Rollout) -> bool:
    return "failed on our side" in (rollout.error or "")


def test_a_completion_without_log_probabilities_is_the_engines_failure(run: Run) -> None:
    _, rollouts, _ = run
    told = sorted(str(rollout.error) for rollout in rollouts.values() if is_engines(rollout))
    assert len(told) == 4
    for what in ("log-probability nan", "log-probability 0.5", "log-probability -inf", "logprobs"):
        assert sum(what in error and "EngineError" in error for error in told) == 1, (what, told)
    for rollout in rollouts.values():
        assert all(-math.inf < value <= 0 for call in rollout.calls for value in call.completion.logprobs)


def test_weights_stay_numbers_and_ranks_equal(run: Run) -> None:
    ranks, _, _ = run
    assert all(rank["is_finite"] for rank in ranks)
    assert {rank["sum"] for rank in ranks} == {ranks[0]["sum"]}
    *made, skipped = ranks[0]["log"]
    assert all(math.isfinite(entry["loss"]) and entry["polar/skipped_steps"] == 0 for entry in made)
    assert math.isnan(skipped["loss"]) and skipped["polar/skipped_steps"] == 1
    assert any(entry["polar/trained_tokens"] for entry in made)


def test_what_a_skipped_step_had_is_named_and_not_called_trained(run: Run) -> None:
    _, _, out = run
    *made, skipped = [json.loads(line) for line in (out / "trained.jsonl").read_text().splitlines()]
    assert all("skipped" not in line for line in made) and any(line["rollouts"] for line in made)
    assert (skipped["rollouts"], skipped["rows"], skipped["tokens"]) == ([], 0, 0)
    assert skipped["skipped"] == "its loss is not finite"
    was_to_be = {name for name, line in describe(out).items() if line["dropped"] is None}
    assert set(skipped["not_trained"]) == was_to_be - {name for line in made for name in line["rollouts"]} != set()
    rows = [line for line in read_lines(out) if line["type"] == "row"]
    assert {row["rollout"] for row in rows} == was_to_be - set(skipped["not_trained"])
    assert main(["replay", str(out)]) == 0


def give(values: Any, **_: Any) -> Any:
    return values


async def give_later(values: Any, **_: Any) -> Any:
    return values


class Giver:
    def __call__(self, values: Any, **_: Any) -> Any:
        return values


@pytest.mark.parametrize(
    ("function", "name"),
    [(give, "give"), (functools.partial(give, unused=1), "give"), (Giver(), "Giver"), (give_later, "give_later")],
)
def test_numbers_that_are_none_become_infinite_and_names_stay(function: Any, name: str) -> None:
    wrapped = mark_not_finite(function)
    assert wrapped.__name__ == name and is_async_callable(wrapped) == (function is give_later)
    values = [None, 0.25, math.nan, -math.inf, np.float64("nan"), torch.tensor(math.nan), 10**400, True]
    given = wrapped(values=values)
    given = asyncio.run(given) if function is give_later else given
    assert given == [None, 0.25, math.inf, -math.inf, math.inf, math.inf, math.inf, 1.0]
    assert mark_not_finite(give)(values=np.array([1.5, math.nan])) == [1.5, math.inf]


def raising(**_: Any) -> Any:
    return [1.0][3]


async def raising_later(**_: Any) -> Any:
    return [1.0][3]


def of_two(a: Any, b: Any) -> Any: ...


def call_wrapped(function: Any, **kwargs: Any) -> Any:
    given = mark_not_finite(function)(**kwargs)
    return asyncio.run(given) if is_async_callable(function) else given


@pytest.mark.parametrize("function", [raising, raising_later])
def test_a_reward_function_that_raises_is_named_with_its_line(function: Any) -> None:
    begins = function.__code__.co_firstlineno
    place = rf"the reward function {function.__name__} \({HERE}:{begins}\) raised IndexError: list index out of range "
    with pytest.raises(ConfigError, match=rf"^{place}\({HERE}:{begins + 1} in {function.__name__}, `.*`\)$") as caught:
        call_wrapped(function)
    assert isinstance(caught.value.__cause__, IndexError)


def test_a_reward_function_that_cannot_be_called_is_named() -> None:
    with pytest.raises(
        ConfigError, match=rf"of_two \({HERE}:\d+\) raised TypeError: of_two\(\) got an unexpected key"
    ):
        call_wrapped(of_two, completions=[1])


@pytest.mark.parametrize("function", [give, give_later])
@pytest.mark.parametrize(
    ("values", "shown"), [(1.0, "1.0"), ("ok", "'ok'"), ([1.0], r"\[1.0\]"), (None, "None"), ([{}, 1], r"\[{}, 1\]")]
)
def test_a_reward_function_returns_a_number_per_session(function: Any, values: Any, shown: str) -> None:
    said = rf"^the reward function {function.__name__} \({HERE}:\d+\) returned {shown}; it must return a list of one "
    with pytest.raises(ConfigError, match=rf"{said}number \(or None\) per session, 2 here$"):
        call_wrapped(function, values=values, completions=["a", "b"])


def test_a_wrong_reward_function_ends_the_step_in_its_sentence() -> None:
    with pytest.raises(ConfigError, match="it must return a list of one number"):
        compute(None, [lambda **_: 1.0], PASSED, PASSED)


def test_a_reward_model_never_abstains() -> None:
    rewards = torch.tensor([[math.nan, 1.0], [1.0, math.nan], [math.inf, 1.0], [1.0, 1.0]])
    model = torch.nn.Linear(1, 1)
    assert mark_not_finite(model) is model and mark_not_finite("a/model") == "a/model"
    found = find_not_finite(rewards, [give, model])
    assert found.tolist() == [[False, False], [False, True], [True, False], [False, False]]


class Stock(GRPOTrainer):
    """A trainer with as much as TRL's `_calculate_rewards` reads."""

    def __init__(self, functions: list[Any]) -> None:
        self.accelerator = Accelerator(cpu=True)
        self.args = self.state = SimpleNamespace(report_to=[], global_step=0)
        self.reward_funcs, self.reward_processing_classes = functions, [None] * len(functions)
        self.reward_func_names = [function.__name__ for function in functions]
        self.reward_weights = torch.ones(len(functions))
        self.environments = None
        self._pending_extra_logs: Any = {}


def compute(grader: Any, functions: list[Any], *rollouts: Rollout) -> tuple[list[str], torch.Tensor]:
    """Names of the columns, and the rewards."""
    trainer = Stock(list_reward_functions(grader, functions))
    tasks = {"train": {"t": Task(id="t", instruction="x")}}
    rewards = Rewards(trainer, TrlBridge(trainer), has_grader=grader is not None, tasks=tasks, table=None)
    return rewards.names, rewards.compute([SimpleNamespace(rollout=rollout) for rollout in rollouts], "train")


PASSED = Rollout(id="r", task_id="t", group_id="g", calls=(), reward=0.25)


def test_the_graders_verdicts_come_first_and_reward_functions_see_tasks_and_rollouts() -> None:
    def brevity(prompts: Any, task: list[Task], rollouts: list[Rollout], **_: Any) -> list[float]:
        assert prompts == [[{"role": "user", "content": "x"}]] * 2
        assert ([item.id for item in task], rollouts[0]) == (["t", "t"], PASSED)
        return [0.5, 0.75]

    names, rewards_RF = compute(CommandGrader("true"), [brevity], PASSED, replace(PASSED, reward=None))
    assert names == ["grader", "brevity"]
    assert torch.equal(rewards_RF.nan_to_num(-1.0), torch.tensor([[0.25, 0.5], [-1.0, 0.75]]))
    assert compute(CommandGrader("true"), [], PASSED)[1].tolist() == [[0.25]]
    assert compute(None, [lambda rollouts, **_: [0.5]], PASSED)[1].tolist() == [[0.5]]
    with pytest.raises(ConfigError, match="nothing gives a reward"):
        list_reward_functions(None, [])


def test_only_the_warning_of_a_missing_reward_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def reward(rollouts: list[Rollout], **_: Any) -> list[float | None]:
        trl_logger.warning("another warning")
        return [rollout.reward for rollout in rollouts]

    failed = replace(PASSED, reward=None, error="the sandbox broke")
    _, rewards_RF = compute(None, [reward], failed)
    assert torch.isnan(rewards_RF).all()
    assert [record.getMessage() for record in caplog.records] == ["[RANK 0] another warning"]
    Stock([reward])._calculate_rewards([{"rollouts": failed}], ["x"], ["y"], [[]])  # TRL's own trainer still says it
    assert "All reward functions returned None" in caplog.records[-1].getMessage()


def test_a_reward_function_does_not_stand_in_for_a_failure() -> None:
    """Law 4, with a reward function that has a number for every rollout."""
    failed = replace(PASSED, reward=None, error="the grader broke")
    _, rewards_RF = compute(None, [lambda rollouts, **_: [0.5] * len(rollouts)], failed, PASSED)
    assert torch.isnan(rewards_RF[0]).all() and rewards_RF[1].tolist() == [0.5]
