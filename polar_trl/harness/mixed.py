"""Several agents in one run: each group of rollouts, or each rollout, is played by one of them, drawn by weights.

A baseline compares like with like, so the rollouts of a group have one agent by default. A task may name its agent.
"""

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import isfinite
from pathlib import Path

from polar_trl.errors import ConfigError
from polar_trl.harness.base import Harness, Launch, require_launch
from polar_trl.types import Endpoint, Task


class MixedHarness(Harness):
    """Agents of one run, by name. A session is played by one of them, whose launch, exit and requests are its own.

    Args:
        agents: At least one.
        weights: How often each is drawn, relative to the others; 1 where an agent has none.
        within_groups: Draw an agent for each rollout of a group, and not one for the group.

    Raises `ConfigError` for a weight that is not above 0, or of an agent that is not there.
    """

    def __init__(
        self, agents: Mapping[str, Harness], weights: Mapping[str, float] | None = None, *, within_groups: bool = False
    ) -> None:
        weights = weights or {}
        if not agents:
            raise ConfigError("agents names no agent")
        if unknown := set(weights) - set(agents):
            raise ConfigError(f"agents has no {sorted(unknown)[0]!r}, which has a weight; it has {', '.join(agents)}")
        for name, weight in weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight) or weight <= 0:
                raise ConfigError(f"agents: the weight of {name} must be a number above 0, not {weight!r}")
        self.agents = dict(agents)
        self.weights = {name: float(weights.get(name, 1.0)) for name in agents}
        self.within_groups = within_groups
        self.name = "+".join(agents)

    @property
    def folders(self) -> Sequence[Path]:
        """Of all agents."""
        return list(dict.fromkeys(folder for agent in self.agents.values() for folder in agent.folders))

    def install(self) -> None:
        """Install every agent."""
        for agent in self.agents.values():
            agent.install()

    def find_installed_version(self) -> str:
        """Return the version of each agent that has one."""
        found = {name: find_version(agent) for name, agent in self.agents.items()}
        return ", ".join(f"{name} {version}" for name, version in found.items() if version)

    def draw(self, tasks: Sequence[Task], *, group_size: int, seed: str) -> list[str]:
        """Draw the agent of each rollout; the same seed gives the same agents.

        By systematic sampling (Madow and Madow 1944): of N draws, an agent of weight w among W gets N w / W, rounded
        up or down. Their order is random.

        Args:
            tasks: Of the rollouts, in groups of `group_size` of one task each.
        """
        rng = random.Random(seed)
        groups = [tasks[start : start + group_size] for start in range(0, len(tasks), group_size)]
        if self.within_groups:
            return [name for group in groups for name in self._draw_free(group, rng)]
        drawn = self._draw_free([group[0] for group in groups], rng)
        return [name for name, group in zip(drawn, groups, strict=True) for _ in group]

    def _draw_free(self, tasks: Sequence[Task], rng: random.Random) -> list[str]:
        """Draw for each task that names no agent."""
        names, bounds = list(self.weights), list(accumulate(self.weights.values()))
        num_free, offset = sum(task.agent is None for task in tasks), rng.random()
        points = [(place + offset) / num_free * bounds[-1] for place in range(num_free)]
        drawn = [names[min(bisect_right(bounds, point), len(names) - 1)] for point in points]
        rng.shuffle(drawn)
        return [drawn.pop() if task.agent is None else task.agent for task in tasks]

    def build_launch(self, task: Task, endpoint: Endpoint) -> Launch:
        """Build the launch of the first agent that may play the task; the others must have one, too."""
        first, *others = [self.agents[name] for name in list_agents_for(self, task)]
        for agent in others:
            require_launch(agent, [task], max_model_len=endpoint.max_model_len, max_tokens=endpoint.max_tokens)
        return first.build_launch(task, endpoint)


def list_agents(harness: Harness) -> dict[str, Harness]:
    """Return the agents of a run by name: several, or the one."""
    return harness.agents if isinstance(harness, MixedHarness) else {harness.name: harness}


def list_mixed(harness: Harness) -> list[str]:
    """List the names of the agents of a run that has several; none otherwise."""
    return list(harness.agents) if isinstance(harness, MixedHarness) else []


def list_agents_for(harness: Harness, task: Task) -> list[str]:
    """List the names of the agents that may play a task: the run's, or the one that it names. Raises `ConfigError`."""
    names = list(list_agents(harness))
    if task.agent is None:
        return names
    if task.agent not in names:
        raise ConfigError(f"task {task.id!r} names the agent {task.agent!r}, and this run's: {', '.join(names)}")
    return [task.agent]


def require_agents(harness: Harness, tasks: Sequence[Task], **limits: int) -> None:
    """Have every agent that may play a task build a launch for it, as `require_launch`. Raises `ConfigError`."""
    for task in tasks:
        list_agents_for(harness, task)
    require_launch(harness, tasks, **limits)


def find_version(harness: Harness) -> str | None:
    """Return the installed version of an agent; None where it has none."""
    find = getattr(harness, "find_installed_version", None)
    return None if find is None else find()
