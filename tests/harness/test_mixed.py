"""Test several agents in one run: which one plays a rollout, and what is asked of them before a run."""

from collections import Counter
from pathlib import Path

import pytest
from short_sessions import CALL, jobs, runner

from polar_trl.errors import ConfigError
from polar_trl.harness.mixed import MixedHarness, list_agents_for, require_agents
from polar_trl.harness.shell import ShellHarness
from polar_trl.recording.log import read_record
from polar_trl.rollout.runner import Job
from polar_trl.types import Task


def build(*, within_groups: bool = False, **weights: float) -> MixedHarness:
    agents = {name: ShellHarness(CALL, folders=[Path("/opt") / name]) for name in weights}
    return MixedHarness(agents, weights, within_groups=within_groups)


def tasks(num_groups: int, size: int = 4, **fields: str) -> list[Task]:
    return [Task(id=f"t{group}", instruction="x", **fields) for group in range(num_groups) for _ in range(size)]


def test_a_group_has_one_agent_and_a_batch_the_shares_of_the_weights() -> None:
    harness = build(pi=2, codex=1, claude_code=1)
    seen = set()
    for number in range(50):
        drawn = harness.draw(tasks(8), group_size=4, seed=str(number))
        groups = [drawn[start : start + 4] for start in range(0, 32, 4)]
        assert all(len(set(group)) == 1 for group in groups)
        order = tuple(group[0] for group in groups)
        assert Counter(order) == {"pi": 4, "codex": 2, "claude_code": 2}
        assert drawn == harness.draw(tasks(8), group_size=4, seed=str(number))
        seen.add(order)
    assert len(seen) > 20  # in another order each time


def test_shares_that_are_no_whole_numbers_come_out_over_batches() -> None:
    harness = build(often=0.9, seldom=0.1)
    counts = Counter(harness.draw(tasks(1), group_size=4, seed=str(number))[0] for number in range(2000))
    assert 150 < counts["seldom"] < 250


def test_groups_across_agents() -> None:
    harness = build(a=1, b=1, within_groups=True)
    for number in range(20):
        drawn = harness.draw(tasks(3), group_size=4, seed=str(number))
        assert [Counter(drawn[start : start + 4]) for start in (0, 4, 8)] == [{"a": 2, "b": 2}] * 3


@pytest.mark.parametrize("within_groups", [False, True])
def test_a_task_that_names_its_agent_has_it(within_groups: bool) -> None:
    harness = build(a=1, b=9, within_groups=within_groups)
    batch = [*tasks(1, agent="a"), *tasks(9)]
    drawn = harness.draw(batch, group_size=4, seed="0")
    assert drawn[:4] == ["a"] * 4
    assert harness.draw(tasks(2, agent="b"), group_size=4, seed="0") == ["b"] * 8


def test_an_agent_that_the_run_has_not() -> None:
    (task,) = tasks(1, 1, agent="codex")
    for harness, known in ((build(pi=1, mine=1), "pi, mine"), (ShellHarness(CALL), "shell")):
        with pytest.raises(ConfigError, match=f"task 't0' names the agent 'codex', and this run's: {known}"):
            require_agents(harness, [task])
    assert list_agents_for(build(pi=1, codex=1), task) == ["codex"]


def test_each_agent_has_to_be_able_to_play_each_task() -> None:
    harness = MixedHarness(
        {"short": ShellHarness("agent {instruction}"), "long": ShellHarness("cat {instruction_file}")}
    )
    long = Task(id="t", instruction="x" * 140_000)
    with pytest.raises(ConfigError, match="the instruction has 140000 bytes"):
        require_agents(harness, [long])
    require_agents(harness, [Task(id="t", instruction="x" * 140_000, agent="long")])


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), True, "2"])
def test_weights(weight: float) -> None:
    with pytest.raises(ConfigError, match="agents: the weight of a must be a number above 0"):
        build(a=weight)
    with pytest.raises(ConfigError, match="agents has no 'b', which has a weight; it has a"):
        MixedHarness({"a": ShellHarness(CALL)}, {"b": 1})


def test_folders_are_those_of_all() -> None:
    assert list(build(a=1, b=1).folders) == [Path("/opt/a"), Path("/opt/b")]


def test_a_session_is_its_agents(tmp_path: Path) -> None:
    """Launch, exit and requests are of the agent that the job names, and the record says which it was."""

    class Stubborn(ShellHarness):
        def judge_exit(self, result: object, calls: object) -> bool:
            return False

    harness = MixedHarness({"good": ShellHarness(CALL), "stubborn": Stubborn(f"{CALL}; echo mine > mark.txt")})
    grades = []
    with runner(tmp_path, lambda task, box: grades.append(box.get("mark.txt")) or 1.0, harness=harness) as sessions:
        first, second = jobs(tmp_path, 2)
        named = [
            Job(rollout_id=j.rollout_id, group_id="g", task=j.task, agent=agent, record_path=j.record_path)
            for j, agent in ((first, "good"), (second, "stubborn"))
        ]
        results = sessions.run(named)
    assert [(r.rollout.agent, r.rollout.stop_reason) for r in results] == [
        ("good", "completed"),
        ("stubborn", "agent_failed"),
    ]
    assert sorted(map(str, grades)) == ["None", str(b"mine\n")]
    assert [read_record(job.record_path).rollout.agent for job in named if job.record_path] == ["good", "stubborn"]
