"""Serve verifiers' interception server in front of an engine; run with the Python of verifiers' own environment.

Real: the server, the sessions, the train client with its Qwen3 renderer, and the trace's branches. A node of the
message graph is trained in the first branch that it is in, as a trainer that counts each sample once must. Arguments:
the engine's base URL, and the folder of the tokenizer.
"""

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

from peers.control import obey
from renderers.configs import Qwen3RendererConfig
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask


def main() -> None:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        async def run() -> Any:
            done = function(*arguments)
            return await done if asyncio.iscoroutine(done) else done

        return asyncio.run_coroutine_threadsafe(run(), loop).result()

    client = TrainClientConfig(
        base_url=sys.argv[1], api_key_var="NONE", renderer=Qwen3RendererConfig(), renderer_model_name=sys.argv[2]
    )
    context = ModelContext(model="policy", client=client)
    server = call(InterceptionServer)
    call(server.start)
    sessions: dict[str, tuple[RolloutSession, str]] = {}

    def open_session() -> str:
        trace = Trace(task=TraceTask(type="Task", data=TaskData()), agent=AgentInfo(config=AgentConfig()))
        session = RolloutSession(ctx=context, trace=trace)
        key, state_key = call(server.register, session)
        sessions[key] = (session, state_key)
        return str(key)

    def get_rows(key: str) -> dict[str, Any]:
        seen: set[int] = set()
        rows = []
        for branch in sessions[key][0].trace.branches:
            trained: list[bool] = []
            for node in branch.nodes:
                trained += [mask and id(node) not in seen for mask in node.mask]
                seen.add(id(node))
            if branch.trainable and any(trained):
                rows.append({"token_ids": branch.token_ids, "trained": trained, "logprobs": branch.logprobs})
        return {"rows": rows}

    def close_session(key: str) -> None:
        _, state_key = sessions.pop(key)
        call(server.unregister, key, state_key)

    obey(server.base_url, {"open": open_session, "rows": get_rows, "close": close_session})


main()
