"""Harbor's own verifier in a container: its reward file counts, the agent's does not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from polar_trl.errors import SandboxError
from polar_trl.grade.harbor import HarborGrader, parse_reward
from polar_trl.sandbox.base import Sandbox
from polar_trl.sandbox.docker.backend import DockerSandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.tasks.harbor import load_harbor
from polar_trl.types import Task

TOML = """\
[environment]
docker_image = "polar-trl-test:latest"
[verifier]
env = { WANT = "done" }
"""
TEST_SH = """\
#!/bin/bash
if [ "$(cat answer 2>/dev/null)" = "$WANT" ] && [ -e /tests/data ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
  exit 3
fi
"""


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("1\n", 1.0),
        ("0.25", 0.25),
        ('{"reward": 0.5, "speed": 9}', 0.5),
        ('{"a": 1, "b": 0}', 0.5),
        ("true", 1.0),
        ("", None),
        ("{}", None),
        ("nan", None),
        ("NaN", None),
        ("1e999", None),
        ('{"reward": "1"}', None),
        ("[1]", None),
        ("1" * 5000, None),
        ("[" * 100_000, None),
    ],
)
def test_reward_files(text: str, reward: float | None) -> None:
    assert parse_reward(text) == reward


@pytest.fixture
def task(tmp_path: Path) -> Task:
    folder = tmp_path / "task"
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    texts = {"task.toml": TOML, "instruction.md": "Do it.", "tests/test.sh": TEST_SH, "tests/data": ""}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (task,) = load_harbor(folder)
    return task


@pytest.fixture
def box(task: Task, tmp_path: Path) -> Iterator[Sandbox]:
    limits = Limits(memory_mb=512, cpus=1.0, pids=64, disk_mb=64)
    backend = DockerSandboxBackend(limits=limits, root=tmp_path / "state")
    sandbox = backend.create(task, "agent")
    yield sandbox
    sandbox.destroy()
    backend.close()
    assert list((tmp_path / "state").iterdir()) == []


@pytest.mark.containers
@pytest.mark.parametrize(
    ("command", "reward", "counter"),
    [
        ("echo done > answer", 1.0, None),
        ("echo almost > answer", 0.0, None),
        ("mkdir -p /logs/verifier; cd /logs/verifier; echo 1 | tee reward.txt > reward.json", 0.0, "reports_written"),
        ("mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh", 0.0, None),
        ("mkdir -p /logs; ln -s /tmp /logs/verifier; echo 1 > /tmp/reward.json", 0.0, "reports_written"),
        # what runs on after the agent's command is over would write it again and again
        (
            "(setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.json; sleep 0.05; done' > /dev/null 2>&1 &)",
            0.0,
            None,
        ),
    ],
)
def test_only_the_verifier_decides(task: Task, box: Sandbox, command: str, reward: float, counter: str | None) -> None:
    assert box.run(command, env={}, timeout_s=30).exit_code == 0
    grade = HarborGrader().grade(task, box, timeout_s=30)
    assert grade.reward == reward
    assert counter is None or grade.counters[counter] >= 1


@pytest.mark.containers
def test_verifiers_that_do_not_decide(task: Task, box: Sandbox) -> None:
    script = Path(task.metadata["harbor"]["folder"]) / "tests" / "test.sh"
    for text, counter in (
        ("true", "verifier_rewards_missing"),
        ("echo NaN > /logs/verifier/reward.txt", "verifier_rewards_missing"),
        ("echo 1 > /logs/verifier/reward.txt; sleep 60", "verifiers_timed_out"),
    ):
        script.write_text(text)
        grade = HarborGrader().grade(task, box, timeout_s=3)
        assert (grade.reward, grade.counters[counter]) == (0.0, 1)
    script.write_text("echo '{\"reward\": 7}' > /logs/verifier/reward.json; echo 0 > /logs/verifier/reward.txt")
    assert HarborGrader().grade(task, box, timeout_s=30).reward == 1.0


@pytest.mark.containers
def test_a_container_that_is_gone_decides_nothing(task: Task, box: Sandbox) -> None:
    box.destroy()
    with pytest.raises(SandboxError):
        HarborGrader().grade(task, box, timeout_s=30)
