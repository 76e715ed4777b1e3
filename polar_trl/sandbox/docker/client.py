"""Connect to a container engine with a deadline on every call, and remove containers with retries.

docker-py waits for ever for an image, and for its own limit otherwise, however little time the caller has. Here each
call ends after a silence, or at its thread's deadline (`limit_calls`).

Refuses engines that are not on this machine (`SandboxError`).
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import docker
import requests
import urllib3
from docker.errors import APIError, DockerException, NotFound
from docker.transport import UnixHTTPAdapter

from polar_trl.errors import SandboxError

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

DEFAULT_HOST = "unix:///var/run/docker.sock"
SOCKETS = (
    "/var/run/docker.sock",
    "/run/podman/podman.sock",
    "/run/user/{uid}/docker.sock",
    "/run/user/{uid}/podman/podman.sock",
)
"""Where engines listen: the system's Docker and Podman, then those of a user."""
API_TIMEOUT_S = 60.0
PAUSES_S = (2.0, 4.0)
LATE_S = 600.0
"""Time in which a container may still appear that was asked for and given up."""
CLOSE_WAIT_S = 5.0
ENGINE_ERRORS = (DockerException, requests.RequestException, urllib3.exceptions.HTTPError)
"""Errors of calls to the engine. The last kind comes from streams, which docker-py reads past `requests`."""

_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)
_silence_s: ContextVar[float | None] = ContextVar("silence_s", default=None)


@contextmanager
def limit_calls(deadline: float) -> Iterator[None]:
    """End every call of this thread at `deadline` (monotonic seconds)."""
    token = _deadline.set(min(deadline, _deadline.get()))
    try:
        yield
    finally:
        _deadline.reset(token)


@contextmanager
def allow_silence(seconds: float) -> Iterator[None]:
    """Let calls of this thread wait that long for the engine's next bytes, instead of the client's own limit."""
    token = _silence_s.set(seconds)
    try:
        yield
    finally:
        _silence_s.reset(token)


class _BoundedAdapter(UnixHTTPAdapter):  # type: ignore[misc]
    """Give every request a time limit: its caller's, or else the client's own."""

    def send(self, request: Any, stream: bool = False, timeout: float | None = None, **options: Any) -> Any:
        left = _deadline.get() - time.monotonic()
        if left <= 0:
            raise requests.ReadTimeout("no time was left to ask the engine")
        limit = _silence_s.get() or timeout or self.timeout
        return super().send(request, stream=stream, timeout=min(limit, left), **options)


def connect(host: str | None, *, timeout_s: float = API_TIMEOUT_S) -> Any:
    """Return a `docker.DockerClient`. Raises `SandboxError` where no usable engine answers.

    Args:
        host: None takes $DOCKER_HOST, or the first of `SOCKETS` that is there.
        timeout_s: After which the engine counts as silent.
    """
    host = host or find_host() or DEFAULT_HOST
    if not host.startswith("unix://"):
        raise SandboxError(
            f"DOCKER_HOST is {host}, which is no unix socket of this machine. Sandboxes need the engine and the "
            "trainer on one machine: work folders are mounted into containers, and the proxy listens inside of their "
            f"network. Run the trainer on the engine's machine, with DOCKER_HOST={DEFAULT_HOST}"
        )
    try:
        client = docker.DockerClient(base_url=host, timeout=timeout_s, max_pool_size=128)
        client.api.mount(
            "http+docker://", _BoundedAdapter(host.removeprefix("unix://"), timeout=timeout_s, max_pool_size=128)
        )
        version = client.version()
    except ENGINE_ERRORS as error:
        raise SandboxError(
            f"no container engine answers at {host} ({error}); start Docker or Podman, or set DOCKER_HOST"
        ) from error
    logger.info("container engine %s, API %s", version.get("Version"), version.get("ApiVersion"))
    return client


def find_host() -> str | None:
    """Return $DOCKER_HOST, or the address of the first of `SOCKETS` that this user may use; None where none is."""
    paths = [path.format(uid=os.getuid()) for path in SOCKETS]
    found = next((f"unix://{path}" for path in paths if os.access(path, os.R_OK | os.W_OK)), None)
    return os.environ.get("DOCKER_HOST") or found


def retry(
    action: Callable[[], _T],
    failure: str,
    *,
    pauses_s: Sequence[float] = PAUSES_S,
    pause: Callable[[float], object] = time.sleep,
) -> _T:
    """Try again after each pause: a busy engine answers 500 or nothing. Raises `SandboxError` starting with `failure`.

    What the engine refuses is not asked for again, and no pause is begun that ends after the thread's deadline.
    """
    for pause_s in (*pauses_s, math.inf):
        try:
            return action()
        except ENGINE_ERRORS as error:
            if is_refusal(error) or time.monotonic() + pause_s >= _deadline.get() or pause_s == math.inf:
                raise SandboxError(f"{failure}: {error}") from error
            logger.warning("%s, trying again in %g s: %s", failure, pause_s, error)
        pause(pause_s)
    raise AssertionError("the last pause is infinite")


def is_refusal(error: BaseException) -> bool:
    """Return whether the engine refused for good: a client error, but no timeout, conflict or rate limit."""
    return isinstance(error, APIError) and error.is_client_error() and error.status_code not in (408, 409, 429)


class Removals:
    """Removes containers by their names, and remembers those that could not be removed, or that may yet be made.

    An engine that hung makes the container once it goes on, when nobody waits for it any more.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._late_until: dict[str, float] = {}

    @contextmanager
    def expect(self, name: str) -> Iterator[None]:
        """Wrap the call that makes a container: if no answer comes, a later `sweep` removes the container."""
        try:
            yield
        except BaseException as error:
            if not is_refusal(error):
                with self._lock:
                    self._late_until[name] = time.monotonic() + LATE_S
            raise

    def remove(self, name: str) -> None:
        """Remove a container now, or else at a later `sweep`."""
        if not self._try(name, late_until=0.0):
            logger.warning("container %s could not be removed; it will be tried again", name)

    def sweep(self) -> int:
        """Try to remove the remembered containers once more; return how many are left."""
        with self._lock:
            todo, self._late_until = self._late_until, {}
        is_silent = False
        for name, late_until in todo.items():
            if is_silent:
                with self._lock:
                    self._late_until[name] = late_until
            else:
                is_silent = not self._try(name, late_until)
        with self._lock:
            return len(self._late_until)

    def close(self) -> None:
        """Sweep for a moment: an engine may just have woken up."""
        deadline = time.monotonic() + CLOSE_WAIT_S
        with limit_calls(deadline):
            while (left := self.sweep()) and time.monotonic() < deadline:
                time.sleep(0.2)
        if left:
            logger.info("%d containers may still be made; the next start would remove them", left)

    def _try(self, name: str, late_until: float) -> bool:
        """Try to remove; return whether the engine answered. A container not made yet stays remembered."""
        is_answered = True
        try:
            self._client.api.remove_container(name, force=True, v=True)
            return True
        except NotFound:
            if time.monotonic() >= late_until:
                return True
        except ENGINE_ERRORS as error:
            logger.info("container %s: %s", name, error)
            is_answered = False
        with self._lock:
            self._late_until[name] = late_until
        return is_answered
