"""Test the agents of a run file: several by name, one of them alone, and what is refused."""

from typing import Any

import pytest

from polar_trl.errors import ConfigError
from polar_trl.harness.mixed import MixedHarness
from polar_trl.setup.agents import build_harness, choose_agent, take_own_tasks
from polar_trl.setup.run_setup import RunArguments
from polar_trl.types import Task

AGENTS: dict[str, Any] = {
    "pi": {"weight": 2, "agent_options": {"tools": ["bash"]}},
    "codex": None,
    "mine": {"agent": "shell", "agent_command": "agent {instruction}"},
    "old": {"agent": "codex", "agent_options": {"version": "0.1.0"}},
}


def test_several() -> None:
    harness = build_harness(RunArguments(agents=AGENTS, mix_agents_in_groups=True))
    assert isinstance(harness, MixedHarness) and harness.within_groups
    assert {name: agent.name for name, agent in harness.agents.items()} == {
        "pi": "pi", "codex": "codex", "mine": "shell", "old": "codex",
    }  # fmt: skip
    assert harness.weights == {"pi": 2, "codex": 1, "mine": 1, "old": 1}
    assert isinstance(build_harness(RunArguments(agents='{"pi": {}, "codex": {}}')), MixedHarness)


def test_one_of_them_alone() -> None:
    run = choose_agent(
        RunArguments(agents=AGENTS, agent="pi", agent_options={"system_prompt": "x", "tools": ["edit"]})
    )
    assert (run.agent, run.agents) == ("pi", None)
    assert run.agent_options == {"system_prompt": "x", "tools": ["bash"]}  # its own come first
    run = choose_agent(RunArguments(agents=AGENTS, agent="mine", mix_agents_in_groups=True))
    assert (run.agent, run.agent_command, run.mix_agents_in_groups) == ("shell", "agent {instruction}", False)
    assert build_harness(RunArguments(agents=AGENTS, agent="old")).name == "codex"
    alone = RunArguments(agent="pi")
    assert choose_agent(alone) is alone


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"agents": {}}, "agents names no agent; leave it out, or give"),
        ({"agents": "pi"}, "agents is not JSON"),
        ({"agents": ["pi"]}, "agents must be a mapping of names to values"),
        ({"agents": {"a b": {}}}, "agents has the name 'a b'; give one of letters"),
        ({"agents": {"shell": {"agent_command": "x"}}}, "give the entry 'shell' a name of its own"),
        ({"agents": {"pi": 2}}, "agents: pi must be a mapping, such as {weight: 2}, not 2"),
        ({"agents": {"pi": {"wieght": 2}}}, "agents: pi has 'wieght'; it may have weight, agent"),
        ({"agents": {"pi": {"weight": 0}}}, "agents: the weight of pi must be a number above 0, not 0"),
        ({"agents": {"pie": {}}}, "agent 'pie' is not known"),
        ({"agents": {"pi": {}}, "agent": "codex"}, r"agent 'codex' is none of agents \(pi\); leave it out for all"),
        (
            {"agents": {"pi": {}}, "agent_command": "x"},
            "agent_command, agent_files and agent_folders go into the entry",
        ),
        ({"agents": {"pi": {"agent_command": "x"}}}, "agent_command is read only with agent: shell"),
        ({"agent": "pi", "mix_agents_in_groups": True}, "mix_agents_in_groups is for several agents"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_harness(RunArguments(**keys))


def test_tasks_of_other_agents_are_left_out_of_a_run_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = [Task(id=name, instruction="x", agent=agent) for name, agent in (("a", "mine"), ("b", None), ("c", "pi"))]
    several = RunArguments(agents=AGENTS)
    assert take_own_tasks(several, tasks) == tasks and not capsys.readouterr().err
    own = take_own_tasks(RunArguments(agents=AGENTS, agent="mine"), tasks)
    # the entry's own agent has another name, which nobody asks for any more
    assert own == [Task(id="a", instruction="x"), Task(id="b", instruction="x")]
    assert capsys.readouterr().err == "1 tasks name another agent and are left out\n"
    assert [task.id for task in take_own_tasks(RunArguments(agent="pi"), tasks)] == ["b", "c"]
    with pytest.raises(ConfigError, match="all 1 tasks name another agent than 'codex', such as 'mine'"):
        take_own_tasks(RunArguments(agent="codex"), tasks[:1])


def test_options_of_the_run_are_those_of_known_agents() -> None:
    options = {"system_prompt": "x"}
    assert choose_agent(RunArguments(agents=AGENTS, agent="codex", agent_options=options)).agent_options == options
    assert choose_agent(RunArguments(agents=AGENTS, agent="mine", agent_options=options)).agent_options is None
    build_harness(RunArguments(agents=AGENTS, agent_options=options))


def test_an_evaluation_is_of_one() -> None:
    with pytest.raises(
        ConfigError, match="this run has several agents: choose one, --agent pi or codex or mine or old"
    ):
        choose_agent(RunArguments(agents=AGENTS))
