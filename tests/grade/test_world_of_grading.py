"""What the world does while a session is graded: no reward, never 0."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import mounted
from faults import OwnEngine, build

from polar_trl.errors import GradeError, SandboxError
from polar_trl.grade.by_task import GraderByTask
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.types import Task, TestSpec


@pytest.fixture
def task(tmp_path: Path) -> Task:
    tree, hidden = tmp_path / "tree", tmp_path / "hidden"
    tree.mkdir()
    hidden.mkdir()
    (tree / "m.py").write_text("def f():\n    return 2\n")
    (hidden / "test_m.py").write_text("from m import f\n\n\ndef test_f(): assert f() == 2\n")
    spec = TestSpec(
        fail_to_pass=("test_m.py::test_f",),
        python=sys.executable,
        folder=str(hidden),
        files=("test_m.py",),
        paths=("test_m.py",),
    )
    return Task(id="t", instruction="x", workspace=str(tree), tests=spec)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "64m") as disk:
        yield disk


def test_a_full_disk_of_this_machine_decides_nothing(task: Task, small_disk: Path) -> None:
    backend = LocalSandboxBackend(small_disk / "boxes")
    box = backend.create(task, "agent")
    assert GraderByTask(backend).grade(task, box, timeout_s=60).reward == 1.0
    with (small_disk / "somebody").open("wb") as file:
        file.write(b"x" * (40 << 20))
    with pytest.raises(GradeError, match="this machine's disk is full"):
        GraderByTask(backend).grade(task, box, timeout_s=60)
    box.destroy()


@pytest.fixture
def engine() -> Iterator[OwnEngine]:
    engine = OwnEngine()
    engine.up()
    yield engine
    engine.down()


@pytest.mark.containers
def test_an_engine_that_is_gone_decides_nothing(task: Task, tmp_path: Path, engine: OwnEngine) -> None:
    engine.load_image()
    boxes = tmp_path / "boxes"
    backend = build("docker", boxes, host=engine.host, mounts=[Path(sys.prefix), Path(sys.base_prefix)])
    box = backend.create(task, "agent")
    assert task.tests is not None
    wait = "import time\n\n\ndef test_f():\n    open('started', 'w').close()\n    time.sleep(60)\n"
    (Path(task.tests.folder) / "test_m.py").write_text(wait)

    def end_engine() -> None:
        while grading.is_alive() and not any(boxes.glob("t-grade-*/disk/work/started")):
            time.sleep(0.1)
        engine.restart(signal.SIGKILL)

    grading = threading.current_thread()
    ending = threading.Thread(target=end_engine)
    ending.start()
    with pytest.raises(SandboxError):
        GraderByTask(backend).grade(task, box, timeout_s=120)
    ending.join()
    box.destroy()
    backend.close()
