"""Stand in for an engine in tests, here and elsewhere: completions come from a script of token ids.

A prompt that leaves no room for `max_tokens`, and a script that is used up, raise `EngineError`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from polar_trl.engine.base import GenerationParams, TokenEngine
from polar_trl.errors import EngineError
from polar_trl.types import Completion, TokenIds

Reply = Sequence[int] | Completion | EngineError
"""Token ids, which get the engine's own logprob each; a whole completion, given as it is unless it is cut; or what is
raised instead."""


class ScriptedEngine(TokenEngine):
    """An engine of scripted replies.

    Args:
        replies: One per request, in the order of the requests; or a function from prompt ids to a reply.
        delay_s: How long each request takes.
        token_delay_s: How long each token of a reply takes, where somebody looks at them.
        logprob: Of every token of a reply that brings none (nats).
        max_model_len: Prompt and completion tokens together.
    """

    def __init__(
        self,
        replies: Iterable[Reply] | Callable[[TokenIds], Reply],
        *,
        delay_s: float = 0.0,
        token_delay_s: float = 0.0,
        logprob: float = -0.5,
        max_model_len: int = 32768,
        policy_version: int = 0,
    ) -> None:
        self._choose: Callable[[TokenIds], Reply] | None = None
        self._script: deque[Reply] = deque()
        if callable(replies):
            self._choose = replies
        else:
            self._script.extend(replies)
        self._logprob = logprob
        self.delay_s = delay_s
        self.token_delay_s = token_delay_s
        self.max_model_len = max_model_len
        self.policy_version = policy_version
        self.params: list[GenerationParams] = []
        """The parameters of each request, in order."""
        self.num_aborted = 0

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        """Return the next reply, cut to `params.max_tokens` (finish reason "length")."""
        if len(prompt_ids) + params.max_tokens > self.max_model_len:
            raise EngineError(
                f"{len(prompt_ids)} prompt tokens and {params.max_tokens} to sample exceed "
                f"max_model_len {self.max_model_len}"
            )
        self.params.append(params)
        first_policy_version = self.policy_version
        reply = self._take(prompt_ids)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        if isinstance(reply, EngineError):
            raise reply
        if isinstance(reply, Completion):
            if len(reply.token_ids) <= params.max_tokens:
                return reply
            token_ids, logprobs = reply.token_ids, reply.logprobs
        else:
            token_ids, logprobs = tuple(reply), (self._logprob,) * len(reply)
        return Completion(
            token_ids=token_ids[: params.max_tokens],
            logprobs=logprobs[: params.max_tokens],
            finish_reason="length" if len(token_ids) > params.max_tokens else "stop",
            first_policy_version=first_policy_version,
            last_policy_version=self.policy_version,
        )

    async def generate_live(self, prompt_ids: TokenIds, params: GenerationParams, so_far: list[int]) -> Completion:
        """Return the next reply, after its tokens have come one by one."""
        completion = await self.generate(prompt_ids, params)
        try:
            for token_id in completion.token_ids:
                so_far.append(token_id)
                await asyncio.sleep(self.token_delay_s)
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        return completion

    def _take(self, prompt_ids: TokenIds) -> Reply:
        if self._choose is not None:
            return self._choose(prompt_ids)
        if not self._script:
            raise EngineError(f"the script has no reply left for request {len(self.params)}")
        return self._script.popleft()
