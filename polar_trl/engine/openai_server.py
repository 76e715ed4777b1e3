"""Send requests to an OpenAI-compatible server, from any event loop, with retries and exponential backoff.

One thread owns the connections. A server that cannot be reached, or is too busy, is asked again a few times with
growing pauses, which does no harm since nothing of an answer that never came was recorded.
"""

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from polar_trl.errors import ConfigError, EngineBusyError, EngineError
from polar_trl.json_text import mend_json

RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses before a request is sent again; a server that says when to come back is obeyed, up to `MAX_DELAY_S`."""
MAX_DELAY_S = 30.0
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 3600.0
"""An answer comes in one piece, after minutes; the agent's own time limit is what ends the wait."""
START_TIMEOUT_S = 300.0
"""Of a question at the start: a model that has just been loaded may compile first."""
_BUSY = (429, 503)
_TRANSIENT = (*_BUSY, 502, 504)
"""Statuses after which the same request may succeed."""


class RefusedError(EngineError):
    """The server read a request and will not serve it.

    Args:
        message: One sentence, with the server's own words.
        status: HTTP status.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class OpenAIServer:
    """A server's address and the connections to it.

    Args:
        base_url: Where its API begins, such as "http://127.0.0.1:8000/v1".
        api_key: Sent as a bearer token; None for a server that asks for none.

    Raises `ConfigError` for an address that is not http or https.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"{base_url!r} is no address of a server; it looks like http://127.0.0.1:8000/v1")
        self.base_url = base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="polar-remote-engine", daemon=True)
        self._thread.start()
        self._client: httpx.AsyncClient | None = None
        """Made on the thread, by the first request."""

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a body; the server's answer. Cancelling the await closes the connection, by which servers know to stop.

        Raises:
            RefusedError: status 4xx.
            EngineBusyError: it is still too busy after the retries, or was when the await was cancelled.
            EngineError: it cannot be reached, has failed, or does not answer with a JSON object.
        """
        turned_away: list[EngineError] = []
        sending = self._send("POST", path, body, turned_away)
        try:
            future = asyncio.run_coroutine_threadsafe(sending, self._loop)
        except RuntimeError as error:
            sending.close()
            raise self._closed() from error
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if waiting is not None and waiting.cancelling():
                if turned_away:  # whoever gave up did so because of the server
                    raise turned_away[-1] from None
                raise
            raise self._closed() from None  # it was not the caller who gave up, but `close`

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request from a caller without an event loop, and once only: a fault at the start is said at once."""
        try:
            return asyncio.run_coroutine_threadsafe(self._ask(method, path, body), self._loop).result(START_TIMEOUT_S)
        except TimeoutError as error:
            raise EngineError(f"{self.base_url}{path} has not answered in {START_TIMEOUT_S:.0f} s") from error

    def close(self) -> None:
        """Close the connections and end the thread. Requests in flight fail. Safe to call twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _closed(self) -> EngineError:
        return EngineError(f"the connection to {self.base_url} was closed")

    # Everything below runs on the thread.

    async def _shut(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            return await self._try(method, path, None if body is None else json.dumps(body).encode())
        except _TransientError as transient:
            raise transient.error from transient.__cause__

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any], turned_away: list[EngineError]
    ) -> dict[str, Any]:
        """Send until it is answered or the retries are used up; the errors of earlier tries are put into a list."""
        content = json.dumps(body).encode()
        for delay_s in RETRY_DELAYS_S:
            try:
                return await self._try(method, path, content)
            except _TransientError as transient:
                turned_away.append(transient.error)
                await asyncio.sleep(min(max(delay_s, transient.retry_after_s), MAX_DELAY_S))
        try:
            return await self._try(method, path, content)
        except _TransientError as transient:
            raise transient.error from transient.__cause__

    async def _try(self, method: str, path: str, content: bytes | None) -> dict[str, Any]:
        if self._client is None:
            self._client = httpx.AsyncClient(
                headers=self._headers,
                timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            )
        url = f"{self.base_url}{path}"
        try:
            response = await self._client.request(
                method, url, content=content, headers={"content-type": "application/json"}
            )
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise _TransientError(EngineError(f"{url} cannot be reached: {reason}")) from error
        return _read(response, url)


class _TransientError(Exception):
    """A failure that may be over soon, with the error to raise where it is not."""

    def __init__(self, error: EngineError, retry_after_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.retry_after_s = retry_after_s


def _read(response: httpx.Response, url: str) -> dict[str, Any]:
    if response.status_code in _TRANSIENT:
        wait_s = _read_retry_after(response)
        said = f"{url} answers with status {response.status_code}: {_read_error(response)}"
        if response.status_code in _BUSY:
            raise _TransientError(EngineBusyError(said, retry_after_s=max(wait_s, 1.0)), wait_s)
        raise _TransientError(EngineError(said), wait_s)
    if response.is_client_error:
        message = f"{url} refuses the request (status {response.status_code}): {_read_error(response)}"
        raise RefusedError(message, status=response.status_code)
    if not response.is_success:
        raise EngineError(f"{url} answers with status {response.status_code}: {_read_error(response)}")
    try:
        body = _load(response)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{url} does not answer with JSON: {response.text[:200]!r}") from error
    if not isinstance(body, dict):
        raise EngineError(f"{url} does not answer with a JSON object: {response.text[:200]!r}")
    return body


def _load(response: httpx.Response) -> Any:
    """Parse a body as the standard library does: what is no finite number is found where it is used."""
    return json.loads(mend_json(response.text))


def _read_retry_after(response: httpx.Response) -> float:
    """Seconds, also where the server gives a date; 0.0 where it does not say."""
    said = response.headers.get("retry-after", "0")
    try:
        return max(0.0, float(said))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - time.time())
    except ValueError:
        return 0.0


def _read_error(response: httpx.Response) -> str:
    """Read the server's own words: OpenAI's error body has them in error.message, other servers anywhere."""
    try:
        error = _load(response)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError, RecursionError):
        message = response.text
    return str(message).strip()[:500] or "no reason given"
