"""Grade by Harbor's verifier, run in the agent's own sandbox after every process of the agent is dead.

As in the format, /tests and /logs/verifier are emptied, the task's tests/ is laid, `bash /tests/test.sh` runs in the
work folder and writes /logs/verifier/reward.json (a number, or named numbers, of which "reward" counts, else their
mean) or reward.txt. The script's exit code says nothing. Rewards are clamped to 0..1.

The sandbox is the one that the agent worked in, so a program that it replaced there is what the verifier runs: tasks
with hidden tests of their own (tests/spec.json) are graded in a fresh one instead. A container that is gone raises
`SandboxError`, and is no failure of the agent.
"""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_trl.errors import GradeError
from polar_trl.grade.base import Grade, Grader
from polar_trl.grade.changes import UNUSABLE, find_changes
from polar_trl.grade.reward_hacking import add_total, count_planted
from polar_trl.sandbox.base import Sandbox
from polar_trl.types import Task

TESTS, VERDICT = "/tests", "/logs/verifier"
REWARD_FILES = ("reward.json", "reward.txt")
READ_TIMEOUT_S = 60.0


class HarborGrader(Grader):
    """Grades task folders of Harbor by their own tests/test.sh. Needs sandboxes with a root of their own."""

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> Grade:
        """Return the reward. Raises `GradeError`, and `SandboxError` where the container is gone."""
        harbor = task.metadata.get("harbor")
        if not isinstance(harbor, Mapping):
            raise GradeError(f"task {task.id} is no task folder of Harbor's")
        counts = self._count_tampering(sandbox)
        with tempfile.TemporaryDirectory(prefix="polar-verifier-") as empty:
            sandbox.upload(Path(empty), VERDICT)
        sandbox.upload(Path(harbor["folder"]) / "tests", TESTS)
        env = {**task.env, **harbor.get("verifier_env", {})}
        result = sandbox.run(f"bash {TESTS}/test.sh", env=env, timeout_s=timeout_s)
        if result.timed_out:
            counts["verifiers_timed_out"] += 1
            return Grade(reward=0.0, counters=add_total(counts))
        reward = self._read_reward(sandbox)
        if reward is None:
            counts["verifier_rewards_missing"] += 1
        elif not 0.0 <= reward <= 1.0:
            counts["verifier_rewards_clamped"] += 1
        return Grade(reward=min(max(reward or 0.0, 0.0), 1.0), counters=add_total(counts))

    def _count_tampering(self, sandbox: Sandbox) -> Counter[str]:
        try:
            changes = find_changes(sandbox.base_tree, sandbox.host_workdir)
        except tuple(UNUSABLE):
            changes = {}
        counts = count_planted(changes, sandbox.host_home)
        planted = sandbox.run(f"ls -A {VERDICT} {TESTS} 2>/dev/null", env={}, timeout_s=READ_TIMEOUT_S)
        counts["reports_written"] += sum(name in planted.stdout.split() for name in REWARD_FILES)
        return counts

    def _read_reward(self, sandbox: Sandbox) -> float | None:
        """Read the reward file; None where there is none, or no finite number in it."""
        for name in REWARD_FILES:
            result = sandbox.run(f"cat {VERDICT}/{name}", env={}, timeout_s=READ_TIMEOUT_S)
            if result.exit_code == 0:
                return parse_reward(result.stdout)
        return None


def parse_reward(text: str) -> float | None:
    """Parse the text of a reward file; None where that is no finite number."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, Mapping):
        named = [value["reward"]] if "reward" in value else list(value.values())
    else:
        named = [value]
    if not named or not all(isinstance(item, (int, float)) and math.isfinite(item) for item in named):
        return None
    return float(sum(named)) / len(named)
