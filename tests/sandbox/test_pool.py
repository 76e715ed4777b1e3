"""The warm pool: how many sandboxes are made ahead, for which tasks, and the removal of those nobody takes."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar_trl.errors import SandboxError
from polar_trl.sandbox.base import Sandbox
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.sandbox.pool import WarmPool
from polar_trl.types import Task

TASK, OTHER = (Task(id=name, instruction="x", files={"name": name}) for name in ("a", "b"))


class CountingBackend(LocalSandboxBackend):
    """Notes for which tasks it made sandboxes, and how many are there; waits at a gate, and fails when told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.made: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False
        self.changed = threading.Condition()

    def create(self, task: Task, session_id: str):  # type: ignore[no-untyped-def]
        assert self.gate.wait(30)
        if self.fails:
            raise SandboxError("no luck")
        sandbox = self.last = super().create(task, session_id)
        with self.changed:
            self.made.append(task.id)
            self.changed.notify_all()
        return sandbox

    def wait_for(self, made: list[str]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: sorted(self.made) == sorted(made), 30), self.made


@pytest.fixture
def backend(tmp_path: Path) -> CountingBackend:
    return CountingBackend(tmp_path / "boxes")


@pytest.fixture
def pool(backend: CountingBackend, tmp_path: Path) -> Iterator[WarmPool]:
    pool = WarmPool(backend, depth=2)
    yield pool
    pool.close()
    assert list((tmp_path / "boxes").iterdir()) == [], "a sandbox was left behind"


def use(sandbox: Sandbox, name: str) -> None:
    assert sandbox.get("name") == name.encode()
    assert sandbox.run("touch used", env={}, timeout_s=20).exit_code == 0
    sandbox.destroy()


def test_an_order_is_made_at_once_and_given_out_once(pool: WarmPool, backend: CountingBackend) -> None:
    pool.order(TASK)
    backend.wait_for(["a"])
    first = pool.create(TASK, "s1")
    assert backend.made == ["a"]
    second = pool.create(TASK, "s2")
    assert backend.made == ["a", "a"]
    use(first, "a")
    assert second.get("used") is None
    use(second, "a")


def test_depth_bounds_what_waits_and_a_taken_one_makes_room(pool: WarmPool, backend: CountingBackend) -> None:
    for task in (TASK, TASK, OTHER, OTHER):
        pool.order(task)
    backend.wait_for(["a", "a"])
    use(pool.create(TASK, "s"), "a")
    backend.wait_for(["a", "a", "b"])
    pool.close()
    assert sorted(backend.made) == ["a", "a", "b"]


def test_one_that_is_being_made_is_waited_for(pool: WarmPool, backend: CountingBackend) -> None:
    backend.gate.clear()
    pool.order(TASK)
    threading.Timer(0.2, backend.gate.set).start()
    use(pool.create(TASK, "s"), "a")
    assert backend.made == ["a"]


def test_an_order_that_waits_is_made_by_who_wants_it(pool: WarmPool, backend: CountingBackend) -> None:
    for task in (TASK, TASK, OTHER):
        pool.order(task)
    backend.wait_for(["a", "a"])
    use(pool.create(OTHER, "s"), "b")
    pool.withdraw(TASK)
    pool.withdraw(TASK)
    assert sorted(backend.made) == ["a", "a", "b"]


def test_a_withdrawn_order_leaves_nothing(pool: WarmPool, backend: CountingBackend, tmp_path: Path) -> None:
    pool.order(TASK)
    backend.wait_for(["a"])
    pool.withdraw(TASK)
    assert list((tmp_path / "boxes").iterdir()) == []
    pool.withdraw(TASK)
    use(pool.create(TASK, "s"), "a")


def test_a_failure_in_the_background_is_tried_again_by_its_session(pool: WarmPool, backend: CountingBackend) -> None:
    backend.fails = True
    pool.order(TASK)
    pool.order(TASK)
    with pytest.raises(SandboxError, match="no luck"):
        pool.create(TASK, "s")
    backend.fails = False
    use(pool.create(TASK, "s"), "a")
    assert backend.made == ["a"]


def test_one_that_was_lost_meanwhile_is_made_anew(pool: WarmPool, backend: CountingBackend) -> None:
    pool.order(TASK)
    backend.wait_for(["a"])
    backend.last.destroy()
    use(pool.create(TASK, "s"), "a")
    assert backend.made == ["a", "a"]


def test_tasks_with_other_files_do_not_share(pool: WarmPool, backend: CountingBackend) -> None:
    pool.order(TASK)
    use(pool.create(Task(id="a", instruction="x", files={"name": "c"}), "s"), "c")
    assert sorted(backend.made) == ["a", "a"]


def test_no_depth_makes_nothing_early_and_a_closed_pool_neither(backend: CountingBackend) -> None:
    none = WarmPool(backend, depth=0)
    none.order(TASK)
    use(none.create(TASK, "s"), "a")
    none.close()
    none.order(TASK)
    assert backend.made == ["a"]
