"""Serve OpenEnv's capture server in front of an engine; run with the Python of OpenEnv's own environment.

Real: the server, its session registry, the graph, `export_session` and `to_training_trace` (what TRL's AsyncGRPO
reads). Arguments: the engine's base URL.
"""

import socket
import sys
from typing import Any

from openenv.core.harness.capture.contract import to_training_trace
from openenv.core.harness.capture.export import export_session
from openenv.core.harness.capture.runner import CaptureServer
from peers.control import obey


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = CaptureServer(llm_url=sys.argv[1], model="policy", port=port)
    server.start()

    def open_session() -> str:
        return server.registry.create(purpose="train").session_id

    def get_rows(key: str) -> dict[str, Any]:
        session = server.registry.get(key)
        document = export_session(session)
        rows = [
            {"token_ids": row["input_ids"], "trained": row["loss_mask"], "logprobs": row["logprobs"]}
            for row in document["sequences"]
            if row["trainable"]
        ]
        try:
            trace = to_training_trace(session.graph, document)
        except ValueError as error:
            return {"rows": rows, "turns": None, "why": str(error)}
        turns = [
            {
                "prompt_ids": list(turn.prompt_token_ids),
                "output_ids": list(turn.completion_token_ids),
                "output_log_probs": list(turn.per_token_logps),
                "output_mask": list(turn.loss_mask[len(turn.prompt_token_ids) :]),
            }
            for turn in trace.turns
        ]
        return {"rows": rows, "turns": turns}

    obey(
        f"http://127.0.0.1:{port}",
        {"open": open_session, "rows": get_rows, "close": lambda key: server.registry.delete(key)},
    )


main()
