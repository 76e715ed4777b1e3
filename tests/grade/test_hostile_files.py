"""What the agent's files and code do to grading, in real sandboxes: reward 0 with a counter, in the grading's time."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from small_package import grade_work, make_task

from polar_trl.sandbox.base import SandboxBackend
from polar_trl.sandbox.bwrap.backend import BwrapSandboxBackend
from polar_trl.sandbox.docker.backend import DockerSandboxBackend
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.types import Task

LIMITS = Limits(memory_mb=512, cpus=1.0, pids=64, disk_mb=64)
SOLVE = "sed -i s/1/2/ src/pkg/m.py"
GRADE_S = 20.0

BACKENDS = ["local", "bwrap", pytest.param("docker", marks=pytest.mark.containers)]
LIMITED = BACKENDS[1:]
"""With a disk, memory and processes of their own."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SandboxBackend]:
    mounts, root = [Path(sys.prefix), Path(sys.base_prefix)], tmp_path / "boxes"
    made: SandboxBackend
    if request.param == "local":
        made = LocalSandboxBackend(root)
    elif request.param == "bwrap":
        made = BwrapSandboxBackend(limits=LIMITS, root=root, mounts=mounts)
    else:
        made = DockerSandboxBackend(limits=LIMITS, root=root, image="polar-trl-test:latest", mounts=mounts)
    yield made
    made.close()
    assert list(root.iterdir()) == [], "a sandbox was left behind"


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return replace(make_task(tmp_path, protected=()), files={"data/in.txt": "given"})


grade = partial(grade_work, timeout_s=GRADE_S)


def python(code: str) -> str:
    return f"python3 - <<'END'\n{code}\nEND"


FILES = {
    "too many names": (
        python(
            "import os\nopen('a', 'w')\nos.mkdir('d')\nfor i in range(101_000):\n"
            "    i % 50_000 or open(f'a{i}', 'w')\n    os.link(f'a{i // 50_000 * 50_000}', f'd/{i}')"
        ),
        "changes_too_large",
    ),
    "a sparse file larger than may be copied": ("truncate -s 600M big", "changes_too_large"),
    "a file of 300 names that is too large as 600": (
        "dd if=/dev/zero of=a bs=1M count=2 status=none; for i in $(seq 300); do ln a a$i; done",
        "changes_too_large",
    ),
    "10,000 folders in each other": (
        python("import os\nfor _ in range(10_000):\n    os.mkdir('a')\n    os.chdir('a')"),
        "changes_unreadable",
    ),
    "a path longer than the kernel takes": (
        python("import os\nfor _ in range(100):\n    os.mkdir('n' * 200)\n    os.chdir('n' * 200)\nopen('x', 'w')"),
        "changes_unreadable",
    ),
    "a FIFO for the module": ("rm src/pkg/m.py; mkfifo src/pkg/m.py", "special_files"),
    "a socket for the package": (
        "rm -r src/pkg; " + python("import socket\nsocket.socket(socket.AF_UNIX).bind('src/pkg')"),
        "special_files",
    ),
    "/dev/zero for the module": ("ln -sf /dev/zero src/pkg/m.py", "special_files"),
    "the work folder's content gone, and a link out": ("rm -rf src tests data .git; ln -s /etc src", "tests_edited"),
}
HARMLESS = {
    "FIFOs, sockets and loops of links beside the work": (
        "mkfifo p; ln -s p q; ln -s loop loop; ln -s / root; ln -s /dev/zero zero; "
        + python("import socket\nsocket.socket(socket.AF_UNIX).bind('sock')")
    ),
    "names that are no text": "touch $'\\xff\\xfe' $'a\\nb' $(printf 'n%.0s' {1..255}); echo x > $'src/pkg/\\xff.py'",
    "a folder that the task filled is a link out": "rm -r data; ln -s /etc data",
    "a FIFO for the folder of tests": "rm -r tests; mkfifo tests",
    "the folder of tests a link out": "rm -r tests; ln -s /etc tests",
    "a repository that is broken, with hooks": (
        "echo nonsense > .git/HEAD; rm -rf .git/objects; mkdir -p .git/hooks; printf '#!/bin/sh\\nexit 1\\n' > "
        ".git/hooks/pre-commit; chmod +x .git/hooks/*; git config core.fsmonitor 'touch /tmp/x' || true; "
        "echo '* filter=evil working-tree-encoding=UTF-16' > .gitattributes"
    ),
    "a repository that is a FIFO": "rm -rf .git; mkfifo .git",
    "a repository of many files": "mkdir .git/x; cd .git/x; seq 3000 | xargs touch",
}
CODE = {
    "kills its parent": ("import os\nos.kill(os.getppid(), 9)", "test_runs_died"),
    "kills all": ("import os\nos.kill(-1, 9)", "test_runs_died"),
    "stops its parent": ("import os\nos.kill(os.getppid(), 19)\nos.kill(os.getpid(), 19)", "test_runs_timed_out"),
    "stops all": ("import os\nos.kill(-1, 19)\nos.kill(os.getpid(), 19)", "test_runs_timed_out"),
    "never ends": ("while True: pass", "test_runs_timed_out"),
    "closes all files": ("import os\nos.closerange(0, 256)", "test_runs_died"),
    "writes nonsense to every pipe": (
        "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'[' * 100_000 + b'\\n')\n"
        "    except OSError:\n        pass\nos._exit(0)",
        "test_runs_died",
    ),
}
GREEDY = {
    "prints for ever": "while True: print('x' * (1 << 20))",
    "a fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "a memory hog": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "a full disk": "with open('/tmp/full', 'wb') as file:\n    while True: file.write(b'x' * (1 << 20))",
    "many files": "import os\nfor i in range(10 ** 9): open(f'/tmp/{i}', 'w').close()",
}


def has_counter(counters: dict[str, int], name: str) -> bool:
    return any(found.startswith(name) for found in counters)


@pytest.mark.parametrize("name", FILES)
def test_files_that_cannot_be_graded_are_worth_nothing(backend: SandboxBackend, task: Task, name: str) -> None:
    command, counter = FILES[name]
    reward, counters = grade(task, backend, f"{SOLVE}; {command}")
    assert reward == 0.0
    assert has_counter(counters, counter), counters


@pytest.mark.parametrize("name", HARMLESS)
def test_odd_files_beside_the_work_change_no_reward(backend: SandboxBackend, task: Task, name: str) -> None:
    assert grade(task, backend, HARMLESS[name])[0] == 0.0
    assert grade(task, backend, f"{SOLVE}; {HARMLESS[name]}")[0] == 1.0


def test_rights_that_were_taken_away(backend: SandboxBackend, task: Task) -> None:
    # root, which grades here, reads them all the same
    assert grade(task, backend, f"{SOLVE}; chmod 000 src/pkg/m.py tests; chmod 000 src")[0] == 1.0


@pytest.mark.parametrize("name", CODE)
def test_code_that_ends_or_stops_its_grading_is_worth_nothing(backend: SandboxBackend, task: Task, name: str) -> None:
    code, counter = CODE[name]
    reward, counters = grade(task, backend, f"{SOLVE}\ncat >> src/pkg/m.py <<'END'\n{code}\nEND", timeout_s=8)
    assert reward == 0.0
    assert has_counter(counters, counter), counters


@pytest.mark.parametrize("backend", LIMITED, indirect=True)
@pytest.mark.parametrize("name", GREEDY)
def test_code_that_takes_all_there_is_is_worth_nothing(backend: SandboxBackend, task: Task, name: str) -> None:
    reward, counters = grade(task, backend, f"{SOLVE}\ncat >> src/pkg/m.py <<'END'\n{GREEDY[name]}\nEND", timeout_s=8)
    assert reward == 0.0
    assert has_counter(counters, "test_runs_") or not counters  # a test that failed, or none at all


@pytest.mark.parametrize("backend", LIMITED, indirect=True)
@pytest.mark.parametrize(
    "command",
    [
        "dd if=/dev/zero of=a bs=1M count=1 status=none; for i in $(seq 100); do ln a a$i; done",
        "truncate -s 100M big",
        # names of one file cost no inodes; the files that they become do
        python("import os\nopen('a', 'w')\nfor i in range(20_000): os.link('a', f'a{i}')"),
    ],
    ids=["hard links", "a sparse file", "inodes"],
)
def test_what_fits_the_agents_disk_and_not_the_graders_is_worth_nothing(
    backend: SandboxBackend, task: Task, command: str
) -> None:
    assert grade(task, backend, f"{SOLVE}; {command}") == (0.0, {"changes_too_large": 1})


def test_copying_takes_of_the_gradings_own_time(backend: SandboxBackend, task: Task) -> None:
    command = f"{SOLVE}; mkdir d; cd d; seq 3000 | xargs touch"
    assert grade(task, backend, command)[0] == 1.0
    assert grade(task, backend, command, timeout_s=0.01) == (0.0, {"changes_too_large": 1})


COMMANDS = {
    "a FIFO": ("mkfifo out.txt", "grep -qx hello out.txt || exit 1"),
    "an endless file": ("ln -s /dev/zero out.txt", "grep -qx hello out.txt || exit 1"),
    "bytes that are no text": (
        "printf '\\377' > out.txt",
        'python3 -c \'open("out.txt", encoding="utf-8").read()\' 2>&1 || test $? = 1 -a ! -s out.txt || exit 3',
    ),
    "a module that ends the grader": (
        "echo 'import os; os.kill(os.getpid(), 9)' > calc.py",
        "python3 -c 'import calc'",
    ),
    "the grader's own script removed": ("rm check.sh", "bash check.sh"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_the_agents_files_broke_is_worth_nothing(backend: SandboxBackend, name: str) -> None:
    command, grader = COMMANDS[name]
    files = {"check.sh": "exit 1\n", "calc.py": "assert False\n"}
    task = Task(id="t", instruction="x", grader=grader, files=files)
    assert grade(task, backend, command, timeout_s=4) == (0.0, {"graders_broken": 1})
    assert grade(replace(task, grader="exit 0"), backend, command, timeout_s=60) == (1.0, {})
