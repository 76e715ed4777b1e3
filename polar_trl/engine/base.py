"""What the proxy asks of an engine: token ids in, token ids and logprobs out. No text, no messages."""

import math
from dataclasses import dataclass
from typing import Protocol

from polar_trl.errors import EngineError
from polar_trl.types import Completion, TokenIds


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationParams:
    """The distribution to sample from and when to stop.

    `temperature` divides the logits; logprobs are those of the scaled distribution. The truncations
    (`top_p`, `top_k`, `min_p`) are for evaluation: training refuses them, since the trainer's logprobs do not
    apply them.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end the completion; the tokens that spelled them stay in it."""


class Engine(Protocol):
    """A sampler. `generate` is awaited on any event loop; cancelling it aborts the request."""

    max_model_len: int
    """Prompt and completion tokens together."""

    @property
    def policy_version(self) -> int:
        """Grows by one whenever the weights change."""
        ...

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        """Sample one completion. Raises `EngineError` if the engine fails or closes meanwhile."""
        ...


def require_logprobs(completion: Completion) -> Completion:
    """The completion, if its log-probabilities are some. Raises `EngineError` naming the first that is none."""
    for position, logprob in enumerate(completion.logprobs):
        if not -math.inf < logprob <= 0.0:
            raise EngineError(
                f"the engine gave log-probability {logprob} for sampled token {position} of "
                f"{len(completion.token_ids)}; it must be a finite number, at most 0"
            )
    return completion
