"""Serve a proxy on a real socket for tests, with the engines and clients around it."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai

from polar_trl.engine.base import Engine, GenerationParams, TokenEngine
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import EngineBusyError
from polar_trl.proxy import Proxy
from polar_trl.recording.log import SessionLog
from polar_trl.sandbox.base import Sandbox
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Completion, Endpoint, Message, TokenIds, ToolCall

RENDERER = ByteRenderer()
PARAMS = GenerationParams(max_tokens=100, temperature=0.7)
HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


def say(text: str = "", **fields: Any) -> TokenIds:
    return RENDERER.spell(Message(role="assistant", text=text, **fields))


def call_tool(name: str, arguments: str) -> TokenIds:
    return say(tool_calls=(ToolCall(id="", name=name, arguments=arguments),))


def new_log(session_id: str = "s1") -> SessionLog:
    return SessionLog(session_id=session_id, task_id="t", group_id="g")


@contextmanager
def serve(engine: Engine, renderer: Renderer = RENDERER, **settings: Any) -> Iterator[Proxy]:
    with Proxy(engine, renderer, **({"params": PARAMS, "ping_interval_s": 0.02} | settings)) as proxy:
        yield proxy


def http(endpoint: Endpoint) -> httpx.Client:
    headers = {"authorization": f"Bearer {endpoint.api_key}"}
    return httpx.Client(base_url=endpoint.origin, headers=headers, timeout=600)


def client(endpoint: Endpoint) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{endpoint.origin}/v1", api_key=endpoint.api_key, timeout=600, max_retries=0)


class BusyEngine(ScriptedEngine):
    """Sends the first request back."""

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        if not self.params:
            self.params.append(params)
            raise EngineBusyError("the weights are changing", retry_after_s=0.2)
        return await super().generate(prompt_ids, params)


class GatedEngine(TokenEngine):
    """Tells when a request has come in and answers when it is let."""

    max_model_len = 1000
    policy_version = 0

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.num_requests = 0
        self.num_aborted = 0

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        self.num_requests += 1
        self.entered.release()
        try:
            while not self.gate.is_set():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        return Completion(token_ids=say("done"), logprobs=(-1.0,) * 5, finish_reason="stop")


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for two minutes or more: two cores may be busy with trainings and containers of other tests."""
    tick = threading.Event()
    for _ in range(24_000):
        if condition():
            return
        tick.wait(0.005)
    raise AssertionError("it never came true")


def kill_when_up(box: Sandbox) -> None:
    """Kill what runs in a sandbox once it has made the file `up`; returns at once."""

    def kill() -> None:
        wait_until(lambda: box.get("up") is not None)
        box.kill()

    threading.Thread(target=kill, daemon=True).start()
