"""Grade by Harbor's verifier, run in the agent's own sandbox after every process of the agent is dead.

As in the format, /tests and /logs/verifier are emptied, the task's tests/ is laid, `bash /tests/test.sh` runs in the
work folder and writes /logs/verifier/reward.json (named numbers, of which "reward" counts, else their mean) or
reward.txt (a number). The script's exit code says nothing. Rewards are clamped to 0..1.

Harbor's rule holds: a verifier that runs out of time, or leaves no reward file that can be read, has decided nothing
(`GradeError`). One exception: where it decides over the untouched task, in a fresh sandbox, the agent was what broke
it, and the reward is 0.

The sandbox is the one that the agent worked in, so a program that it replaced there is what the verifier runs: tasks
with hidden tests of their own (tests/spec.json) are graded in a fresh one instead. A container that is gone raises
`SandboxError`, and is no failure of the agent.
"""

import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_trl.errors import GradeError
from polar_trl.grade.base import Grade, Grader, report_output
from polar_trl.grade.changes import UNUSABLE, find_changes
from polar_trl.grade.fresh import FreshSandboxes
from polar_trl.grade.reward_hacking import add_total, count_planted
from polar_trl.sandbox.base import Sandbox, SandboxBackend
from polar_trl.types import Task

TESTS, VERDICT = "/tests", "/logs/verifier"
REWARD_FILES = ("reward.json", "reward.txt")
READ_TIMEOUT_S = 20.0


class HarborGrader(Grader):
    """Grades task folders of Harbor by their own tests/test.sh. Needs sandboxes with a root of their own.

    Args:
        backend: Makes the sandboxes in which a verifier that decided nothing is tried over the untouched task. None:
            it is not.
    """

    def __init__(self, backend: SandboxBackend | None = None) -> None:
        self._fresh = None if backend is None else FreshSandboxes(backend)

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> Grade:
        """Return the reward. Raises `GradeError`, and `SandboxError` where the container is gone."""
        if not isinstance(task.metadata.get("harbor"), Mapping):
            raise GradeError(f"task {task.id} is no task folder of Harbor's")
        deadline = time.monotonic() + timeout_s
        counts = _count_tampering(sandbox, deadline)
        try:
            reward, said = _run_verifier(task, sandbox, deadline)
        except GradeError as failure:
            if self._fresh is None:
                raise
            with self._fresh.open(task, with_files=True) as untouched:
                try:
                    _run_verifier(task, untouched, time.monotonic() + timeout_s)
                except GradeError:
                    raise failure from None
            counts["verifiers_broken"] += 1
            return Grade(reward=0.0, counters=add_total(counts), report=report_output(failure.output))
        if not 0.0 <= reward <= 1.0:
            counts["verifier_rewards_clamped"] += 1
        reward = min(max(reward, 0.0), 1.0)
        return Grade(reward=reward, counters=add_total(counts), report=report_output(said))


def _count_tampering(sandbox: Sandbox, deadline: float) -> Counter[str]:
    try:
        changes = find_changes(sandbox.base_tree, sandbox.host_workdir, deadline=deadline)
    except tuple(UNUSABLE):
        changes = {}  # the files stay where they are, and the verifier may well read them
    counts = count_planted(changes, sandbox.host_home)
    planted = sandbox.run(f"ls -A {VERDICT} {TESTS} 2>/dev/null", env={}, timeout_s=_left(deadline, READ_TIMEOUT_S))
    counts["reports_written"] += sum(name in planted.stdout.split() for name in REWARD_FILES)
    return counts


def _run_verifier(task: Task, sandbox: Sandbox, deadline: float) -> tuple[float, str]:
    """Lay the tests, run them; return the reward and the end of the output. `GradeError` where nothing is decided."""
    harbor = task.metadata["harbor"]
    with tempfile.TemporaryDirectory(prefix="polar-verifier-") as empty:
        sandbox.upload(Path(empty), VERDICT)
    sandbox.upload(Path(harbor["folder"]) / "tests", TESTS)
    env = {**task.env, **harbor.get("verifier_env", {})}
    result = sandbox.run(f"bash {TESTS}/test.sh", env=env, timeout_s=_left(deadline))
    if result.timed_out:
        raise GradeError(f"task {task.id}: its verifier ran out of time", output=result.tail())
    for name in REWARD_FILES:
        found = sandbox.run(f"cat {VERDICT}/{name}", env={}, timeout_s=READ_TIMEOUT_S)
        if found.exit_code == 0:
            return parse_reward(name, found.stdout), result.tail()
    said = (result.stderr.strip() or result.stdout.strip())[-300:]
    raise GradeError(
        f"task {task.id}: its verifier (exit code {result.exit_code}) wrote no {VERDICT}/reward.txt or reward.json"
        + (f"; it printed: {said!r}" if said else ""),
        output=result.tail(),
    )


def _left(deadline: float, most_s: float = math.inf) -> float:
    return min(max(deadline - time.monotonic(), 0.0), most_s)


def parse_reward(name: str, text: str) -> float:
    """Parse a reward file as Harbor does, by its name. Raises `GradeError` where Harbor finds no reward in it."""
    try:
        value: Any = {"reward": float(text)} if name.endswith(".txt") else json.loads(text, parse_int=float)
    except (ValueError, RecursionError, OverflowError):
        raise GradeError(f"{name} of the verifier cannot be read: {text[:100]!r}") from None
    named = value if isinstance(value, Mapping) else {}
    numbers = [item for item in named.values() if isinstance(item, (int, float)) and math.isfinite(item)]
    if not numbers or len(numbers) != len(named):
        raise GradeError(f"{name} of the verifier has no finite numbers by name: {text[:100]!r}")
    return float(named["reward"]) if "reward" in named else sum(numbers) / len(numbers)
