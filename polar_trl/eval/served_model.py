"""Open the engine of a server: one of token ids, or of text alone where the server gives none.

A fault of the server is found and said before any session runs, and a server counts as an engine of token ids only
once its answers were proved to be what the records will say they are (`RemoteEngine.probe`).
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoTokenizer

from polar_trl.engine.base import Engine, GenerationParams
from polar_trl.engine.chat_server import ChatServer
from polar_trl.engine.openai_server import OpenAIServer
from polar_trl.engine.remote import NoTokenIdsError, RemoteEngine, find_served_model
from polar_trl.errors import ConfigError, EngineError
from polar_trl.grpo.config import PolarGRPOConfig

API_KEY_VARIABLE = "OPENAI_API_KEY"
_PROBE_TEXT = "def naïve(x):\n\treturn 'naïve 🙂' + str(12345)  # two  spaces, ÀÉÎ, 中文\n"


@contextmanager
def open_served_model(
    base_url: str,
    args: PolarGRPOConfig,
    params: GenerationParams,
    *,
    model: str | None,
    served_name: str | None = None,
    text_only: bool = False,
) -> Iterator[Engine]:
    """Open an engine for a `Proxy`; the connections are closed after the block.

    Args:
        base_url: Of the server; a key is read from $OPENAI_API_KEY.
        params: How sessions will be sampled.
        model: Folder or hub name whose tokenizer the server should have; None is for text alone.
        served_name: The model's name on the server; None where it serves only one.
        text_only: Do not ask for token ids.

    Raises `ConfigError` for a server that cannot be used.
    """
    server = OpenAIServer(base_url, api_key=os.environ.get(API_KEY_VARIABLE))
    try:
        found = find_served_model(server, served_name)
        lengths = [n for n in (args.vllm_max_model_length, found.max_model_len) if n is not None]
        if not lengths:
            raise ConfigError(
                f"{base_url} does not say how long a context of {found.name} may be; give vllm_max_model_length"
            )
        engine = None
        if model is not None and not text_only:
            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=args.trust_remote_code)
            engine = RemoteEngine(server, model=found.name, max_model_len=min(lengths))
            if not _gives_token_ids(engine, tokenizer, params, base_url):
                engine = None
        if engine is not None:
            yield engine
        else:
            chat = ChatServer(server, model=found.name, max_model_len=min(lengths))
            chat.probe(params)
            yield chat
    finally:
        server.close()


def _gives_token_ids(engine: RemoteEngine, tokenizer: Any, params: GenerationParams, base_url: str) -> bool:
    """Tell whether the engine gives token ids, also on stderr. Raises `ConfigError` for other ids than ours."""
    text = _PROBE_TEXT
    if tokenizer.chat_template:  # with the markup of turns, in which relatives of a tokenizer differ
        question = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    try:
        engine.probe(text, tuple(tokenizer.encode(text, add_special_tokens=False)), params)
    except NoTokenIdsError as error:
        print(f"polar-trl: text only, without token ids: {error}", file=sys.stderr, flush=True)
        return False
    except EngineError as error:
        raise ConfigError(f"{base_url} cannot be used: {error}") from error
    return True
