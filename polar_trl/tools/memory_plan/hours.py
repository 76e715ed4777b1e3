"""Estimate the hours of a run from rates that were measured on one H200 (docs/performance.md, docs/results).

A step is its rollouts, then its training. Sampling: tokens per second of a 4B model by the sessions that run at once
(phases.json, throughput_4b.json), in proportion to the model's weights for larger ones, and at most what 0.6B gains.
Training: floating-point operations as scripts/gpu/train_flops.py counts them, at the share of the card's peak that
train_cost.py measured. An agent's tools, graders and the wait for the slowest session are not in it.
"""

from dataclasses import dataclass

import numpy as np

from polar_trl.grpo.memory.memory import MemoryPlan
from polar_trl.grpo.memory.setup import Setup

PEAK_FLOPS = 989.4e12
"""Dense bfloat16 of an H200 and of an H100."""
USED = {"attention": 0.37, "hybrid": 0.30}
"""Share of the peak in a pass, with what checkpointing computes again, by whether some layers are recurrent
(docs/results/train_cost_needed.json and train_cost_needed_hybrid.json: 4B, LoRA, Liger's kernels)."""
SAMPLED_PER_S = ((1, 120), (32, 3850), (64, 3910), (256, 6440))
"""Sessions at once, and tokens per second that a 4B model samples for all of them together."""
SMALL_GAIN = 1.34
"""What 0.6B samples more than 4B at 64 sessions."""
SAMPLED_SHARE = 0.3
"""Of a session's tokens, as scripts/bench/session_lengths.py has it; the others are prompts and tool results."""
OVERHEAD = 0.03
"""Share of a step that is neither (phases.json)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hours:
    """The time of a run on each of its GPUs, estimated."""

    num_steps: int | None
    """None where the run file has no `max_steps`."""
    sessions: int
    """Of a step, on each GPU."""
    session_tokens: int
    """Of a session at its end."""
    rollouts_s: float
    """Of a step."""
    training_s: float
    """Of a step."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return (self.rollouts_s + self.training_s) / (1 - OVERHEAD)

    @property
    def hours(self) -> float | None:
        """Of all steps; None where their number is not known."""
        return None if self.num_steps is None else self.num_steps * self.step_s / 3600


def estimate_hours(
    setup: Setup, found: MemoryPlan, *, sessions: int, max_agents: int, session_tokens: int, num_steps: int | None
) -> Hours:
    """Estimate the hours of a run.

    Args:
        sessions: Of a step, on each GPU.
        max_agents: That run at the same time, per GPU.
    """
    # as many run at once as there are agents, sessions, and room for in the cache
    at_once = max(1, min(max_agents, sessions, found.kv_tokens // session_tokens))
    counts, rates = zip(*SAMPLED_PER_S, strict=True)
    size = sum(weight.numel for weight in setup.weights if not weight.is_adapter)
    rate = float(np.interp(at_once, counts, rates)) * min(SMALL_GAIN, 4.0e9 / size)
    used = USED["hybrid" if found.is_hybrid else "attention"]
    training = sessions * session_tokens * count_token_flops(setup, found, session_tokens) / (used * PEAK_FLOPS)
    return Hours(
        num_steps=num_steps,
        sessions=sessions,
        session_tokens=session_tokens,
        rollouts_s=sessions * session_tokens * SAMPLED_SHARE / rate,
        training_s=training,
    )


def count_token_flops(setup: Setup, found: MemoryPlan, session_tokens: int) -> float:
    """Count the operations of a trained token: 2 per weight forward, and backward 2 for its input and, where it is
    trained, 2 for itself (Kaplan et al. 2020, arXiv:2001.08361); attention by the mean context of a session."""
    config = setup.model_config.get_text_config()
    again = found.checkpointed_layers / found.num_layers
    layers = [weight for weight in setup.weights if not weight.is_embedding]
    linear = sum(weight.numel * (2 + again * 2 + (4 if weight.is_trained else 2)) for weight in layers)
    kinds = getattr(config, "layer_types", None) or ()
    softmax = config.num_hidden_layers - sum(kind == "linear_attention" for kind in kinds)
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    attention = softmax * 4 * width * session_tokens / 2
    return linear + attention * (3 + again) + 6 * SAMPLED_SHARE * config.hidden_size * config.vocab_size
