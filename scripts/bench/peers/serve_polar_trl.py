"""Serve polar_trl's own proxy, with its scripted engine in the same process, as in training; calls go to disk.

Arguments: the folder of the tokenizer, and "policy" (the sessions of table A) or "constant" (one reply, table B).
"""

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers.control import obey
from peers.policy import Policy, encode_constant_reply, load_tokenizer

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.proxy import Proxy
from polar_trl.reconstruct import build_prefix_merged, check_laws
from polar_trl.recording.log import SessionLog
from polar_trl.recording.session import SessionLimits
from polar_trl.tokens.load import load_renderer
from polar_trl.types import Completion, Rollout, TokenIds


def main() -> None:
    tokenizer = load_tokenizer(sys.argv[1])
    renderer = load_renderer(tokenizer, sys.argv[1])
    policy = Policy(tokenizer)
    constant = tuple(encode_constant_reply(tokenizer))

    def sample(prompt_ids: TokenIds) -> Completion | TokenIds:
        if sys.argv[2] == "constant":
            return constant
        sampled, finish_reason = policy.sample(list(prompt_ids))
        return Completion(
            token_ids=tuple(sampled.token_ids),
            logprobs=tuple(sampled.logprobs),
            finish_reason="length" if finish_reason == "length" else "stop",
        )

    engine = ScriptedEngine(sample, max_model_len=1 << 20)
    logs: dict[str, SessionLog] = {}
    numbers = itertools.count()
    with (
        tempfile.TemporaryDirectory() as folder,
        Proxy(engine, renderer, params=GenerationParams(max_tokens=4096)) as proxy,
    ):

        def open_session() -> str:
            name = f"s{next(numbers)}"
            log = SessionLog(session_id=name, task_id="t", group_id="g", path=Path(folder) / f"{name}.jsonl")
            key = proxy.open_session(log, SessionLimits(max_calls=1 << 30)).api_key
            logs[key] = log
            return key

        def get_rows(key: str) -> dict[str, Any]:
            rollout = Rollout(id="r", task_id="t", group_id="g", calls=logs[key].calls)
            built = build_prefix_merged(rollout)
            check_laws(rollout, built)
            rows = [
                {"token_ids": list(row.token_ids), "trained": row.trainable, "logprobs": row.logprobs}
                for row in built.trajectories
            ]
            return {"rows": rows, "samples": [vars(taken) for taken in policy.samples]}

        def close_session(key: str) -> None:
            proxy.close_session(key)
            del logs[key]

        commands = {"open": open_session, "rows": get_rows, "close": close_session, "begin": policy.begin}
        obey(proxy.origin, commands)


main()
