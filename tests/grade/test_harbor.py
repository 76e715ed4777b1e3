"""Harbor's own verifier in a container: its reward file counts, the agent's does not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from polar_trl.errors import GradeError, SandboxError
from polar_trl.grade.harbor import HarborGrader, parse_reward
from polar_trl.sandbox.base import Sandbox, SandboxBackend
from polar_trl.sandbox.docker.backend import DockerSandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.tasks.harbor import load_harbor
from polar_trl.types import Task

TOML = """\
[environment]
docker_image = "polar-trl-test:latest"
network_mode = "no-network"
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
READ = 'set -e; test ! -e answer || python3 -c \'open("answer", encoding="utf-8").read()\''


@pytest.mark.parametrize(
    ("name", "text", "reward"),
    [
        ("reward.txt", "1\n", 1.0),
        ("reward.txt", " .25 ", 0.25),
        ("reward.json", '{"reward": 0.5, "speed": 9}', 0.5),
        ("reward.json", '{"a": 1, "b": 0}', 0.5),
        ("reward.json", '{"reward": true}', 1.0),
        ("reward.txt", "", None),
        ("reward.txt", "true", None),
        ("reward.txt", "nan", None),
        ("reward.txt", "1e999", None),
        ("reward.json", "1", None),  # Harbor wants names
        ("reward.json", "{}", None),
        ("reward.json", '{"reward": NaN}', None),
        ("reward.json", '{"reward": 1, "speed": "9"}', None),
        ("reward.json", '{"reward": ' + "1" * 5000 + "}", None),
        ("reward.json", "[1]", None),
        ("reward.json", "[" * 100_000, None),
    ],
)
def test_reward_files(name: str, text: str, reward: float | None) -> None:
    if reward is not None:
        assert parse_reward(name, text) == reward
    else:
        with pytest.raises(GradeError, match=f"{name} of the verifier"):
            parse_reward(name, text)


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
def backend(tmp_path: Path) -> Iterator[SandboxBackend]:
    limits = Limits(memory_mb=512, cpus=1.0, pids=64, disk_mb=64)
    backend = DockerSandboxBackend(limits=limits, root=tmp_path / "state")
    yield backend
    backend.close()
    assert list((tmp_path / "state").iterdir()) == []


@pytest.fixture
def box(task: Task, backend: SandboxBackend) -> Iterator[Sandbox]:
    sandbox = backend.create(task, "agent")
    yield sandbox
    sandbox.destroy()


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


def write_verifier(task: Task, text: str) -> None:
    (Path(task.metadata["harbor"]["folder"]) / "tests" / "test.sh").write_text(text)


@pytest.mark.containers
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("true", r"\(exit code 0\) wrote no /logs/verifier/reward.txt"),
        ("echo oh >&2; exit 7", r"\(exit code 7\) wrote no .*it printed: 'oh'"),
        ("echo NaN > /logs/verifier/reward.txt", "no finite numbers"),
        ("echo 1 > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", "reward.json of the verifier"),
        ("echo 1 > /logs/verifier/reward.txt; sleep 60", "ran out of time"),
    ],
)
def test_harbors_rule_no_reward_file_is_no_reward(
    task: Task, backend: SandboxBackend, box: Sandbox, script: str, message: str
) -> None:
    write_verifier(task, script)
    with pytest.raises(GradeError, match=message):
        HarborGrader(backend).grade(task, box, timeout_s=3 if "sleep" in script else 60)


@pytest.mark.containers
@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("mkfifo answer", "cat answer; echo 0 > /logs/verifier/reward.txt"),
        ("printf '\\377' > answer", READ + "; echo 0 > /logs/verifier/reward.txt"),
        ("cp /bin/true /usr/bin/tee", "echo 1 | /usr/bin/tee /logs/verifier/reward.txt"),
    ],
)
def test_a_verifier_that_the_agent_broke_is_reward_0(
    task: Task, backend: SandboxBackend, box: Sandbox, command: str, script: str
) -> None:
    write_verifier(task, script)
    assert box.run(command, env={}, timeout_s=30).exit_code == 0
    grade = HarborGrader(backend).grade(task, box, timeout_s=5)
    assert (grade.reward, grade.counters["verifiers_broken"]) == (0.0, 1)


@pytest.mark.containers
def test_a_reward_beyond_the_bounds_is_clamped(task: Task, box: Sandbox) -> None:
    write_verifier(
        task,
        "echo '{\"reward\": 7}' > /logs/verifier/reward.json; echo 0 > /logs/verifier/reward.txt; exit 1",
    )
    grade = HarborGrader().grade(task, box, timeout_s=30)
    assert (grade.reward, grade.counters["verifier_rewards_clamped"]) == (1.0, 1)


@pytest.mark.containers
def test_a_container_that_is_gone_decides_nothing(task: Task, box: Sandbox) -> None:
    box.destroy()
    with pytest.raises(SandboxError):
        HarborGrader().grade(task, box, timeout_s=30)
