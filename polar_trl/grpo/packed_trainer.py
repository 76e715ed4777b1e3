"""Train rows of any length with TRL's GRPO, so that a step costs what its tokens cost.

Rows of all ranks are spread over ranks and forward passes by predicted cost and forwarded without padding, shared
prefixes once; ranks run equal numbers of passes, since a missing one would leave collectives waiting for ever. The
losses are TRL's, over the rollouts of an optimizer step. Rows come from a subclass (`_collect_rows`): from agents'
sessions in `PolarGRPOTrainer`. `step.py` is a training step, top to bottom.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from polar_trl.engine.rounding import find_pass_dtype
from polar_trl.errors import ConfigError
from polar_trl.grpo.config import PackedGRPOConfig
from polar_trl.grpo.logs.phases import PhaseClock
from polar_trl.grpo.loss.step_loss import StepLoss
from polar_trl.grpo.loss.token_loss import MicroBatch
from polar_trl.grpo.memory.checkpointing import Checkpointing
from polar_trl.grpo.packing.batch import to_rows
from polar_trl.grpo.packing.forward import choose_layout, prepare_model, score
from polar_trl.grpo.packing.packer import Packer
from polar_trl.grpo.packing.prefix import keep_prefix
from polar_trl.grpo.packing.supported import find_causal_model
from polar_trl.grpo.rows import Row
from polar_trl.grpo.step import TrainingStep
from polar_trl.grpo.trl_bridge import TrlBridge
from polar_trl.grpo.weights.policy_weights import PolicyWeights
from polar_trl.grpo.weights.step_guard import StepGuard


class PackedGRPOTrainer(GRPOTrainer):
    """GRPO whose forward passes are filled by tokens. Arguments are TRL's."""

    args: PackedGRPOConfig
    accelerator: Any
    model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.aux_loss_enabled:
            raise ConfigError(
                "the model's loss has a term that balances its experts, which is not computed on packed rows: set "
                "router_aux_loss_coef: 0"
            )
        policy = find_causal_model(self.accelerator.unwrap_model(self.model))
        self.layout_kind = choose_layout(policy, self.args.sequence_layout)
        for model in (policy, self.ref_model):
            if model is not None:
                prepare_model(find_causal_model(model), self.layout_kind)
        _sum_gradients_in_float32(self.accelerator)
        self.args.logging_nan_inf_filter = False  # it would log the mean of other steps in the place of a NaN
        self.trl = TrlBridge(self)
        self.phases = PhaseClock(self._metrics)
        self.add_callback(self.phases)
        self.policy_weights = PolicyWeights(
            self.vllm_generation.compute_dtype if self.use_vllm else find_pass_dtype(self.accelerator, self.model),
            seed=self.args.seed,
            dithered=self.args.weight_rounding == "dithered",
            is_deepspeed=self.is_deepspeed_enabled,
        )
        self.add_callback(self.policy_weights)
        self.step_guard = StepGuard(self.accelerator)
        self.step_loss = StepLoss(
            self.args,
            self.accelerator,
            self.trl,
            score=self._score,
            ref_model=self.ref_model,
        )
        checkpointing = Checkpointing(self.args, self.accelerator, self.accelerator.unwrap_model(self.model))
        self.step = TrainingStep(
            self.args,
            self.accelerator,
            self.trl,
            collect_rows=self._collect_rows,
            packer=Packer(
                *(self.args, self.accelerator, policy, self.layout_kind), count_spare=checkpointing.count_spare_tokens
            ),
            loss=self.step_loss,
            guard=self.step_guard,
            phases=self.phases,
            checkpointing=checkpointing,
        )

    def _collect_rows(self, inputs: list[dict[str, Any]], mode: str) -> list[Row]:
        """Return rows of this rank for its data rows (a collective)."""
        raise NotImplementedError

    def _score(self, model: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies [B, C] of the rows of a pass (nats)."""
        packed = micro_batch["packed"]
        causal_model = find_causal_model(self.accelerator.unwrap_model(model))
        # a pass that trains keeps it until its backward pass is over (`Checkpointing.apply`)
        is_trained = torch.is_grad_enabled()
        keeping = nullcontext() if is_trained else keep_prefix(packed.layout, causal_model, self.accelerator)
        with self.accelerator.autocast(), keeping:
            logps_S, entropies_S = score(model, packed)
        return to_rows(logps_S, micro_batch), to_rows(entropies_S, micro_batch)

    # What transformers' loop calls, in its order.

    def _prepare_inputs(self, inputs: MicroBatch) -> MicroBatch:
        """Pass on what it is given: transformers' trainer asks for the inputs of every pass, and ours are ready."""
        return inputs

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run one micro-step."""
        return self.step.run(model, inputs)

    def _compute_loss(self, model: Any, inputs: MicroBatch) -> Tensor:
        return self.step_loss.compute(model, inputs)

    def _clip_grad_norm(self, model: Any) -> Any:
        """transformers'; without rows there is nothing to clip, and nothing that `GradScaler` could unscale."""
        return super()._clip_grad_norm(model) if self.step_guard.has_rows else None

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        """transformers', which asks for it right before the optimizer's step: the step guard decides by it."""
        if self.step_guard.has_rows:
            grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
            grad_norm = None if grad_norm is None else float(grad_norm)
        else:
            grad_norm = 0.0
        self.step.decide(self.optimizer, grad_norm)
        return grad_norm

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.step.write_trained()
        with self.trl.restarted_loss(tr_loss):
            super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """Return the loss of an evaluation batch."""
        return self.step.evaluate(model, inputs), None, None


def _sum_gradients_in_float32(accelerator: Any) -> None:
    """Over passes and ranks, under FSDP2, where accelerate would have them summed in the pass's half precision."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)
