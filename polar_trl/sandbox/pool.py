"""A warm pool: a backend that makes sandboxes ahead of time, wrapped around another backend.

`order` has one made in the background, `create` takes one that was ordered for such a task or makes it then. At most
`depth` are ready or being made at a time, however many agents run; other orders wait their turn. No sandbox is handed
out twice.
"""

import logging
import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from polar_trl.errors import PolarError
from polar_trl.sandbox.base import Sandbox, SandboxBackend
from polar_trl.types import Task

logger = logging.getLogger(__name__)

MAX_MAKING = 4


class WarmPool(SandboxBackend):
    """Wraps a backend.

    Args:
        backend: Makes the sandboxes.
        depth: How many may be ready or in the making; 0 makes every one when it is asked for.
    """

    def __init__(self, backend: SandboxBackend, *, depth: int) -> None:
        self.capabilities = backend.capabilities
        self.depth = depth
        self._backend = backend
        self._lock = threading.Lock()
        self._waiting: list[Task] = []
        self._made: list[tuple[Hashable, Future[Sandbox]]] = []
        self._num_ordered = 0
        self._is_closed = False
        self._makers = ThreadPoolExecutor(max_workers=min(MAX_MAKING, max(1, depth)), thread_name_prefix="polar-warm")

    def prepare(self, tasks: Sequence[Task]) -> None:
        """See `SandboxBackend.prepare`."""
        self._backend.prepare(tasks)

    def order(self, task: Task) -> None:
        """Have a sandbox for such a task made in the background."""
        with self._lock:
            if self.depth > 0 and not self._is_closed:
                self._waiting.append(task)
                self._start_making()

    def withdraw(self, task: Task) -> None:
        """Take an order back: one that waits is forgotten, else a sandbox that was made for it is removed."""
        key = _build_key(task)
        with self._lock:
            if self._forget(key):
                return
            made = self._take(key)
        if made is not None:
            made.add_done_callback(_destroy)

    def create(self, task: Task, session_id: str) -> Sandbox:
        """Return a sandbox that was ordered, or a fresh one. Raises `SandboxError`."""
        key = _build_key(task)
        with self._lock:
            made = self._take(key)
            if made is None:
                self._forget(key)
        if made is not None:
            with suppress(PolarError, OSError):  # it may well work now, and if not, the error is this session's own
                sandbox = made.result()
                if sandbox.is_alive():  # an engine may have been restarted since
                    return sandbox
                _destroy(made)
        return self._backend.create(task, session_id)

    def give_up(self) -> None:
        """See `SandboxBackend.give_up`."""
        self._backend.give_up()

    def close(self) -> None:
        """Remove sandboxes that nobody took, then close the backend."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            made, self._made = self._made, []
        for _, future in made:
            future.add_done_callback(_destroy)
        self._makers.shutdown(wait=True)
        self._backend.close()

    def _start_making(self) -> None:
        while self._waiting and len(self._made) < self.depth:
            task = self._waiting.pop(0)
            self._num_ordered += 1
            future = self._makers.submit(self._backend.create, task, f"warm-{self._num_ordered}-{task.id}")
            self._made.append((_build_key(task), future))

    def _take(self, key: Hashable) -> "Future[Sandbox] | None":
        """Take the sandbox that is furthest in the making for such a task; its slot is free then."""
        places = [place for place, (other, _) in enumerate(self._made) if other == key]
        if not places:
            return None
        _, future = self._made.pop(next((place for place in places if self._made[place][1].done()), places[0]))
        self._start_making()
        return future

    def _forget(self, key: Hashable) -> bool:
        for place, task in enumerate(self._waiting):
            if _build_key(task) == key:
                del self._waiting[place]
                return True
        return False


def _build_key(task: Task) -> Hashable:
    """Build the key of tasks whose sandboxes are alike."""
    made_from = (
        *(task.image, task.build_context, task.workspace, task.workdir, task.start_patch),
        *(task.network, task.writable_root),
    )
    return (*made_from, tuple(sorted(task.files.items())), tuple(sorted(task.env.items())))


def _destroy(made: "Future[Sandbox]") -> None:
    if made.cancelled() or made.exception() is not None:
        return
    try:
        made.result().destroy()
    except (PolarError, OSError) as failure:
        logger.warning("a warm sandbox could not be removed: %s", failure)
