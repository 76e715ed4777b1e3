"""Sample token ids and logprobs from a server that takes and gives token ids, such as `vllm serve`.

The requests are OpenAI's /completions with vLLM's `return_token_ids`. A server that gives text alone, one with another
tokenizer, and one with logprobs of another distribution than it samples from are found out at the start (`probe`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polar_trl.engine.base import GenerationParams, TokenEngine
from polar_trl.engine.openai_server import OpenAIServer, RefusedError
from polar_trl.errors import ConfigError, EngineError
from polar_trl.types import Completion, TokenIds

NUM_PROBE_TOKENS = 8
_CERTAIN = 1e-3
"""Nats. A probe's token is as good as certain up to here, whatever divided its logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A model as a server's list names it."""

    name: str
    max_model_len: int | None
    """Prompt and completion tokens together; None where the server does not say."""


class NoTokenIdsError(EngineError):
    """A server answers with text only."""


def find_served_model(server: OpenAIServer, name: str | None = None) -> ServedModel:
    """Find the model of that name, or the only one there is, in the server's list of models.

    A server without a list, such as one of NeMo Gym, is taken at the name's word. Raises `ConfigError` if the server
    cannot be reached, has neither a list nor a name, or leaves a choice.
    """
    try:
        entries = server.ask("GET", "/models").get("data")
    except EngineError as error:
        if isinstance(error, RefusedError) and error.status == 404 and name is not None:
            return ServedModel(name=name, max_model_len=None)
        if isinstance(error, RefusedError) and error.status in (401, 403):
            raise ConfigError(f"{error}; set $OPENAI_API_KEY to a key of the server") from error
        raise ConfigError(
            f"no model is served at {server.base_url}: {error}; start the server first, and give the address under "
            "which it has /models, such as http://127.0.0.1:8000/v1"
        ) from error
    if not isinstance(entries, list) or not all(isinstance(e, dict) and isinstance(e.get("id"), str) for e in entries):
        raise ConfigError(f"{server.base_url}/models lists no models; it is no OpenAI-compatible server")
    models = {entry["id"]: entry.get("max_model_len") for entry in entries}
    if name is None and len(models) == 1:
        name = next(iter(models))
    if name is None or name not in models:
        asked = "name one of them" if name is None else f"{name!r} is not among them"
        raise ConfigError(f"{server.base_url} serves {', '.join(sorted(models)) or 'no model'}: {asked} (served_name)")
    length = models[name]
    return ServedModel(name=name, max_model_len=length if isinstance(length, int) else None)


class RemoteEngine(TokenEngine):
    """An engine on a server. The server's weights may change unseen, so the version stays 0.

    Args:
        server: Closed by whoever made it.
        model: Its name there.
        max_model_len: Prompt and completion tokens together.
    """

    policy_version = 0

    def __init__(self, server: OpenAIServer, *, model: str, max_model_len: int) -> None:
        self._server = server
        self._model = model
        self.max_model_len = max_model_len

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        """Sample one completion; see `Engine.generate`. Cancelling the await aborts the request on the server."""
        answer = await self._server.post("/completions", self._build_body(prompt_ids, params))
        return _parse_completion(answer, prompt_ids)

    def probe(self, text: str, token_ids: TokenIds, params: GenerationParams) -> None:
        """Find out whether what this server answers can be trained on.

        Args:
            text: Any text, and
            token_ids: what our tokenizer makes of it.
            params: What sessions will be sampled with.

        Raises:
            NoTokenIdsError: it gives no token ids.
            ConfigError: it has another tokenizer, or gives logprobs of another distribution than `params` say.
            EngineError: it fails.
        """
        greedy = GenerationParams(max_tokens=NUM_PROBE_TOKENS, temperature=0.0)
        body = self._build_body(token_ids, greedy)
        try:
            theirs = _read_prompt_ids(self._server.ask("POST", "/completions", body | {"prompt": text}))
            sampled = _parse_completion(self._server.ask("POST", "/completions", body), token_ids)
        except (RefusedError, NoTokenIdsError) as error:
            if isinstance(error, RefusedError) and error.status in (401, 403):
                raise
            raise NoTokenIdsError(f"{self._server.base_url} gives no token ids ({error})") from error
        if theirs != token_ids:
            position = next(i for i, pair in enumerate(_zip_ids(theirs, token_ids)) if pair[0] != pair[1])
            raise ConfigError(
                f"{self._model!r} at {self._server.base_url} has another tokenizer than model_name_or_path: the "
                f"tokens of a text differ from number {position} on (here {token_ids[position : position + 3]}, there "
                f"{theirs[position : position + 3]}); name the model that is served"
            )
        is_plain = params.temperature == 1.0 and params.repetition_penalty == 1.0 and not _truncates(params)
        if not is_plain and not self._gives_processed_logprobs(body, sampled):
            raise ConfigError(
                f"{self._server.base_url} gives logprobs from before temperature and truncation, not those of what it "
                "samples: start it with --logprobs-mode processed_logprobs, or sample at temperature 1 without top_p, "
                "top_k, min_p and repetition_penalty"
            )

    def _gives_processed_logprobs(self, body: Mapping[str, Any], sampled: Completion) -> bool:
        """Tell whether a token that is the only one left has probability 1."""
        alone = {**body, "temperature": 1.0, "top_k": 1}
        forced = _parse_completion(self._server.ask("POST", "/completions", alone), tuple(body["prompt"]))
        if min(sampled.logprobs, default=0.0) > -_CERTAIN:
            return False  # the model was as good as certain of every token: it cannot be told
        return all(logprob > -_CERTAIN for logprob in forced.logprobs)

    def _build_body(self, prompt_ids: TokenIds, params: GenerationParams) -> dict[str, Any]:
        """Build a body with all that shapes the distribution: servers have defaults of their own for a model."""
        return {
            "model": self._model,
            "prompt": list(prompt_ids),
            "add_special_tokens": False,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(params.stop_token_ids),
            "stop": list(params.stop),
            "include_stop_str_in_output": True,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }


def _truncates(params: GenerationParams) -> bool:
    return params.top_p != 1.0 or params.top_k > 0 or params.min_p != 0.0


def _zip_ids(first: TokenIds, second: TokenIds) -> list[tuple[int, int]]:
    """Pair two lists of ids up to the end of the longer one; -1 stands beyond the end of the other."""
    length = max(len(first), len(second))
    pad = (-1,) * length
    return list(zip((first + pad)[:length], (second + pad)[:length], strict=True))


def _get_choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise EngineError(f"the server's answer has no choices: {str(answer)[:200]}")
    return choices[0]


def _read_prompt_ids(answer: Mapping[str, Any]) -> TokenIds:
    return _read_ids(_get_choice(answer), "prompt_token_ids")


def _read_ids(choice: Mapping[str, Any], name: str) -> TokenIds:
    ids = choice.get(name)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise NoTokenIdsError(f"its answer has no {name}")
    return tuple(ids)


def _parse_completion(answer: Mapping[str, Any], prompt_ids: TokenIds) -> Completion:
    """Parse the first choice: one logprob for each token id, and the proof that its prompt was ours."""
    choice = _get_choice(answer)
    token_ids, prompt = _read_ids(choice, "token_ids"), _read_ids(choice, "prompt_token_ids")
    if prompt != prompt_ids:
        raise EngineError(f"the server was given {len(prompt_ids)} prompt ids and answers for {len(prompt)} others")
    listed = choice.get("logprobs")
    logprobs = listed.get("token_logprobs") if isinstance(listed, dict) else None
    tokens = listed.get("tokens") if isinstance(listed, dict) else None
    if not isinstance(logprobs, list) or not all(isinstance(value, (int, float)) for value in logprobs):
        raise EngineError(f"the server's answer has no logprobs: {str(listed)[:200]}")
    if tokens != [f"token_id:{token_id}" for token_id in token_ids] or len(logprobs) != len(token_ids):
        raise EngineError(f"{len(logprobs)} logprobs of tokens that are not the {len(token_ids)} sampled ones")
    finish_reason = choice.get("finish_reason")
    if finish_reason not in ("stop", "length"):
        raise EngineError(f"the server ended the request with {finish_reason!r}")
    return Completion(token_ids=token_ids, logprobs=tuple(map(float, logprobs)), finish_reason=finish_reason)
