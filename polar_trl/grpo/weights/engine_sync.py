"""Keep the colocated engine at the trainer's weights: awake while agents run, asleep while the model trains."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polar_trl.engine.colocate import ColocatedVllm
from polar_trl.grpo.logs.phases import PhaseClock
from polar_trl.grpo.packing.forward import pack_rows, score
from polar_trl.grpo.selfcheck import check_engine
from polar_trl.grpo.trl_bridge import TrlBridge
from polar_trl.grpo.weights.policy_weights import PolicyWeights
from polar_trl.proxy import Proxy

_PROBES = ("The quick brown fox jumps over", "def add(a, b):\n    return", "1, 2, 3, 4,", "a b a b a b a b a b a b")
"""The last one repeats itself, so that an engine that drafts from the prompt does so here."""


@dataclass(eq=False)
class EngineSync:
    """Pushes weights, and turns sampling on and off around rollouts.

    Args:
        generation: TRL's generation backend, which owns the engine.
        proxy: Holds and releases the calls of sessions.
        policy_weights: Measures each push.
        layout_kind: Layout of the passes that score.
    """

    accelerator: Any
    trl: TrlBridge
    generation: ColocatedVllm
    proxy: Proxy
    policy_weights: PolicyWeights
    phases: PhaseClock
    layout_kind: Any
    temperature: float
    _is_checked: bool = field(default=False, init=False)

    def wake(self, mode: str) -> None:
        """Push weights if they have changed, give the engine its memory, and let calls through (a collective).

        Raises:
            EngineError: before the first rollout, the engine does not compute what the trainer computes.
        """
        self.push(mode)
        with self.phases.measure(mode, "wake"):
            self.generation.wake()
        self.check_once(mode)
        self.proxy.release()

    def sleep(self, mode: str) -> None:
        """Hold the calls of sessions that stay open, and give the engine's memory to the trainer."""
        with self.phases.measure(mode, "sleep"):
            self.proxy.hold()
            self.generation.sleep()
        if (share := self.generation.engine.take_prompt_cached()) is not None:
            self.trl.log(mode, {"polar/prompt_cached": share})

    def push(self, mode: str) -> None:
        """Give the engine the trainer's weights if they have changed since the last push (a collective)."""
        step = self.trl.global_step
        is_new = step != self.trl.loaded_step  # weights that were only asleep are no new policy
        if is_new or self.trl.weights_sleep:
            with self.phases.measure(mode, "weight_sync"):
                self.generation.sync_weights(new_policy=is_new)
            self.trl.loaded_step = step
        if is_new:
            # a training metric, also where an evaluation comes before the next step
            self.trl.log("train", self.policy_weights.measure_push(self.generation.engine_dtype, self.accelerator))

    def check_once(self, mode: str) -> None:
        """Compare the engine's log-probabilities with the trainer's, before the first rollout of the process."""
        if self._is_checked:
            return
        engine, model = self.generation.engine, self.trl.model
        model.eval()
        gap = check_engine(
            engine,
            self._score_tokens,
            [self.trl.tokenizer(text)["input_ids"] for text in _PROBES],
            temperature=self.temperature,
            dtypes=(engine.dtype, self.generation.pass_dtype),
        )
        model.train(mode == "train")
        self.trl.log(mode, {"polar/engine_check_gap": gap})
        self._is_checked = True

    @torch.no_grad()
    def _score_tokens(self, prompt: list[int], token_ids: list[int]) -> Tensor:
        """[C] log-probabilities, by the pass that trains."""
        sampled = np.array([False] * len(prompt) + [True] * len(token_ids))
        ids = np.array(prompt + token_ids, dtype=np.int64)
        packed = pack_rows([ids], [sampled], kind=self.layout_kind, device=self.accelerator.device)
        with self.accelerator.autocast():
            return score(self.trl.model, packed)[0]
