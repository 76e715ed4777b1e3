"""Control groups: version 2's files in a folder that imitates them, its rules in the kernel's own hierarchy.

A machine with version 2 only is tried by scripts/dev/on_cgroup_v2.sh.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar_trl.errors import SandboxError
from polar_trl.sandbox import cgroup

LIMITS = {"memory_mb": 200, "cpus": 1.5, "pids": 64}


@pytest.fixture
def imitation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the files that the kernel has in the machine's first group, and in each that is made below it."""
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    make = Path.mkdir

    def make_group(self: Path, *args: object, **kwargs: object) -> None:
        make(self, *args, **kwargs)  # type: ignore[arg-type]
        for name in ("cgroup.subtree_control", "cgroup.procs", "memory.swap.max"):
            if not (self / name).exists():
                (self / name).write_text("")

    monkeypatch.setattr(Path, "mkdir", make_group)
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    tmp_path.mkdir(exist_ok=True)
    return tmp_path


def test_version_2_has_one_group_with_all_limits(imitation: Path) -> None:
    group = cgroup.Cgroup("s", **LIMITS)  # type: ignore[arg-type]
    (procs,) = group.join_files
    folder = Path(procs).parent
    assert folder.parent == imitation / "polar-trl" and folder.name.startswith("s.")
    for above in (imitation, imitation / "polar-trl"):
        assert (above / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
    limits = {name: (folder / name).read_text() for name in ("memory.max", "memory.swap.max", "cpu.max", "pids.max")}
    assert limits == {
        "memory.max": str(200 << 20),
        "memory.swap.max": "0",
        "cpu.max": "150000 100000",
        "pids.max": "64",
    }
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert group.count_oom_kills() == 2


def test_version_2_without_swap(imitation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: self.name != "memory.swap.max" and exists(self))
    (procs,) = cgroup.Cgroup("s", **LIMITS).join_files  # type: ignore[arg-type]
    assert Path(procs).with_name("memory.swap.max").read_text() == ""


def test_what_was_handed_down_already_is_left_alone(imitation: Path) -> None:
    switch = imitation / "cgroup.subtree_control"
    switch.write_text("cpuset cpu io memory pids\n")
    switch.chmod(0o444)
    cgroup.Cgroup("s", **LIMITS)  # type: ignore[arg-type]
    assert switch.read_text() == "cpuset cpu io memory pids\n"


def test_a_group_that_is_gone_is_one_sentence() -> None:
    group = cgroup.Cgroup("polar-test", **LIMITS)  # type: ignore[arg-type]
    group.remove()
    with pytest.raises(SandboxError, match="control group is gone"):
        group.count_oom_kills()


@pytest.fixture
def unified(tmp_path: Path) -> Iterator[Path]:
    """Yield a group of the kernel's own version 2 hierarchy, with a controller that is free for it."""
    top = tmp_path / "unified"
    top.mkdir()
    subprocess.run(["mount", "-t", "cgroup2", "none", str(top)], check=True)
    group = top / f"polar-test-{os.getpid()}"
    group.mkdir()
    (controller, *_) = (top / "cgroup.controllers").read_text().split()
    has_switched = controller not in (top / "cgroup.subtree_control").read_text().split()
    if has_switched:
        (top / "cgroup.subtree_control").write_text(f"+{controller}")
    yield group
    for folder in sorted(group.rglob("*/"), reverse=True):
        if folder.is_dir():
            folder.rmdir()
    group.rmdir()
    if has_switched:
        (top / "cgroup.subtree_control").write_text(f"-{controller}")
    subprocess.run(["umount", "-l", str(top)], check=True)


def test_a_containers_own_group_is_vacated_before_it_hands_controllers_down(
    unified: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (controller, *_) = (unified / "cgroup.controllers").read_text().split()
    monkeypatch.setattr(cgroup, "CONTROLLERS", (controller,))
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            (unified / "cgroup.procs").write_text(str(process.pid))
            with pytest.raises(OSError, match="busy"):  # the kernel's rule, without which this test says nothing
                (unified / "cgroup.subtree_control").write_text(f"+{controller}")
            cgroup._hand_down(unified)
            cgroup._hand_down(unified / "polar-trl")
            assert (unified / "cgroup.procs").read_text() == ""
            assert (unified / cgroup.VACATED / "cgroup.procs").read_text().split() == [str(process.pid)]
            for group in (unified, unified / "polar-trl"):
                assert (group / "cgroup.subtree_control").read_text().split() == [controller]
        finally:
            process.kill()


def test_removing_a_group_of_version_2_kills_what_is_in_it(unified: Path) -> None:
    group = unified / "doomed"
    group.mkdir()
    with subprocess.Popen(["sleep", "600"]) as process:
        (group / "cgroup.procs").write_text(str(process.pid))
        assert cgroup._remove(group)
        assert process.wait(timeout=600) == -signal.SIGKILL
    assert not group.exists()
