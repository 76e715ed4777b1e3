"""Compute the loss of an optimizer step pass by pass, with what it needs of all passes, and the figures logged of it.

The loss of a pass is the sum of its tokens' losses (`token_losses`) times their shares (`rows.token_shares`); passes
add up to the mean over the step's windows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from polar_trl.grpo.logs.trained_rows import TrainedRows
from polar_trl.grpo.loss.importance import RatioStats
from polar_trl.grpo.loss.rollout_terms import add_rollout_terms, needs_rollout_terms
from polar_trl.grpo.loss.token_loss import LossFigures, MicroBatch, token_losses
from polar_trl.grpo.trl_bridge import TrlBridge


@dataclass(eq=False)
class StepLoss:
    """TRL's losses over the rollouts of an optimizer step.

    Args:
        args: The config.
        accelerator: Of the trainer.
        trl: TRL's private state.
        score: Log-probabilities and entropies [B, C] of the rows of a pass under a model (nats).
        ref_model: The reference policy; None where an adapter that is switched off is it, or where there is none.
    """

    args: Any
    accelerator: Any
    trl: TrlBridge
    score: Callable[[Any, MicroBatch], tuple[Tensor, Tensor]]
    ref_model: Any
    _ratio_stats: RatioStats = field(default_factory=RatioStats, init=False)
    _figures: LossFigures = field(default_factory=LossFigures, init=False)
    agents: Sequence[str] = field(default=(), init=False)
    """Names of the agents of a run that has several; the gap of each is logged."""
    trained_rows: TrainedRows | None = field(default=None, init=False)
    """Receives the trained tokens of each pass."""

    # Before the first pass of a step.

    @torch.no_grad()
    def add_reference_logps(self, window: list[MicroBatch], *, is_off_policy: bool) -> None:
        """Give passes the log-probabilities that the loss needs beside its own: of the policy at the window's
        beginning, where later steps train it again, and of the reference policy for the KL penalty."""
        if not is_off_policy and self.args.beta == 0.0:
            return
        with disable_gradient_checkpointing(self.trl.model, self.args.gradient_checkpointing_kwargs):
            # one policy after the other: layers keep what a prefix is under one
            if is_off_policy:
                for micro_batch in window:
                    micro_batch["old_per_token_logps"] = self.score(self.trl.model, micro_batch)[0]
            if self.args.beta != 0.0:
                for micro_batch in window:
                    micro_batch["ref_per_token_logps"] = self._reference_logps(micro_batch)

    def prepare(self, windows: Sequence[Sequence[MicroBatch]]) -> list[MicroBatch]:
        """Return the passes of a step (or of an evaluation batch) with what their loss needs to know of all of it (a
        collective)."""
        passes = [micro_batch for window in windows for micro_batch in window]
        if passes and needs_rollout_terms(self.args, corrects=self.trl.corrects_ratio):
            model = self.trl.model
            with disable_gradient_checkpointing(model, self.args.gradient_checkpointing_kwargs):
                add_rollout_terms(
                    windows,
                    lambda micro_batch: self.score(model, micro_batch),
                    self.args,
                    corrects=self.trl.corrects_ratio,
                    accelerator=self.accelerator,
                )
        num_explored = torch.zeros((), device=self.accelerator.device)
        for micro_batch in passes:
            num_explored += micro_batch["entropy_mask" if "entropy_mask" in micro_batch else "completion_mask"].sum()
        if passes and self.trl.has_entropy_bonus:
            num_explored = self.accelerator.reduce(num_explored, reduction="sum")
        for micro_batch in passes:
            micro_batch |= {"num_windows": len(windows), "num_explored": num_explored.clamp(min=1.0)}
        return passes

    # A pass.

    def compute(self, model: Any, micro_batch: MicroBatch) -> Tensor:
        """Return a pass's part of its step's loss, times the number of ranks, over which gradients are averaged."""
        logps_BC, entropies_BC = self.score(model, micro_batch)
        mask_BC = micro_batch["completion_mask"]
        losses_BC, figures = token_losses(logps_BC, micro_batch, self.args, corrects=self.trl.corrects_ratio)
        loss = (losses_BC * mask_BC * micro_batch["shares"][:, None]).sum() / micro_batch["num_windows"]
        if self.trl.has_entropy_bonus:
            self._figures.add_part("policy_loss", loss)
            explored_BC = micro_batch.get("entropy_mask", mask_BC)
            self._figures.add("explored_entropy", entropies_BC, explored_BC)
            loss = loss - self._entropy_weight() * (entropies_BC * explored_BC).sum() / micro_batch["num_explored"]
        self._figures.add("entropy", entropies_BC, mask_BC)
        for name, (values_BC, weights_BC) in figures.items():
            self._figures.add(name, values_BC, weights_BC)
        trainer_BC = micro_batch.get("old_per_token_logps", logps_BC.detach())
        agents = [row["agent"] for row in micro_batch["rows"]] if self.agents else ()
        self._ratio_stats.add(trainer_BC, micro_batch["sampling_per_token_logps"], mask_BC, agents)
        if self.trained_rows is not None and self.trl.model.training:
            self.trained_rows.note(micro_batch["rows"], trainer_BC)
        return loss * self.accelerator.num_processes

    def forget(self) -> None:
        """Forget the passes since the last `log`: they are run again."""
        self._figures, self._ratio_stats = LossFigures(), RatioStats()
        if self.trained_rows is not None:
            self.trained_rows.forget()

    # After the last pass.

    def log(self, mode: str) -> None:
        """Log the figures of the loss, and how far the trained policy is from the one that sampled, over all tokens of
        a step or an evaluation batch (a collective)."""
        figures, self._figures = self._figures.summarize(self.accelerator), LossFigures()
        explored = figures.pop("explored_entropy", None)
        if explored is not None and mode == "train":
            if self.args.use_adaptive_entropy:
                self._adapt_entropy(explored)
            figures["entropy_coef"] = self.trl.entropy_coef
        stats, self._ratio_stats = self._ratio_stats, RatioStats()
        ratios = stats.summarize(
            self.accelerator,
            clip_min=self.args.vllm_importance_sampling_clip_min,
            clip_max=self.args.vllm_importance_sampling_clip_max,
        )
        if self.agents and mode == "train":
            by_agent = stats.summarize_agents(self.agents, self.accelerator)
            figures |= {f"polar/agents/{agent}/gap": gap for agent, gap in by_agent.items()}
        self.trl.log(mode, {**figures, **{f"sampling/{name}": value for name, value in ratios.items()}})

    def _entropy_weight(self) -> float:
        """The bonus's coefficient as the last step left it; TRL gives none while entropy is above the target."""
        if self.args.use_adaptive_entropy and self.trl.last_entropy > self.args.entropy_target:
            return 0.0
        return self.trl.entropy_coef

    def _adapt_entropy(self, entropy: float) -> None:
        """TRL's controller: the next step's coefficient goes up where this one's entropy (nats) is low."""
        args, self.trl.last_entropy = self.args, entropy
        delta = args.entropy_coef_delta if entropy <= args.entropy_target else -args.entropy_coef_delta
        self.trl.entropy_coef = min(max(self.trl.entropy_coef + delta, args.entropy_coef_min), args.entropy_coef_max)

    def _reference_logps(self, micro_batch: MicroBatch) -> Tensor:
        if self.ref_model is not None:
            return self.score(self.ref_model, micro_batch)[0]
        # a new adapter switched off is the reference; one that training began with was kept as "ref"
        peft_model = self.accelerator.unwrap_model(self.trl.model)
        with use_adapter(peft_model, adapter_name="ref" if "ref" in peft_model.peft_config else None):
            return self.score(self.trl.model, micro_batch)[0]
