"""TRL's GRPO on rows of any length: what a step costs is what its tokens cost.

Rows of all ranks are spread over ranks and forward passes by predicted cost and forwarded without padding, shared
prefixes once. Every loss of TRL is computed by TRL, on the rows' trainable tokens. It knows nothing of agents or of
engines: a subclass says where rows come from (`_collect_rows`). It refuses to let ranks run different numbers of
forward passes, which would leave collectives waiting for ever.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from torch import Tensor
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from polar_trl.engine.colocate import find_pass_dtype
from polar_trl.errors import ConfigError
from polar_trl.grpo.balance import CostModel, Plan, plan_micro_batches
from polar_trl.grpo.batch import build_micro_batch, to_rows
from polar_trl.grpo.config import PackedGRPOConfig
from polar_trl.grpo.forward import choose_layout, prepare_model, score
from polar_trl.grpo.importance import RatioStats, importance_ratio
from polar_trl.grpo.phases import PhaseClock
from polar_trl.grpo.policy_weights import PolicyWeights
from polar_trl.grpo.rows import ROLLOUT_MEAN_LOSSES, Row, row_weights
from polar_trl.grpo.step_guard import StepGuard
from polar_trl.grpo.supported import find_causal_model
from polar_trl.grpo.trained_rows import TrainedRows, describe_row

MicroBatch = dict[str, Any]


class PackedGRPOTrainer(GRPOTrainer):
    """GRPO whose forward passes are filled by tokens. Arguments are TRL's.

    A generation batch of TRL is collected in its first micro-step. The forward passes of an optimizer step, as many
    as its tokens need, all run in its last one; with no rows there is none, and no optimizer step either.
    """

    args: PackedGRPOConfig
    accelerator: Any
    model: Any
    num_iterations: int
    current_gradient_accumulation_steps: int
    _current_train_step_time: float
    _globalstep_last_logged: int
    _total_loss_scalar: float

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
        self._cost = _build_cost_model(policy)
        self._windows: list[list[MicroBatch]] | None = None
        """Of the last generation batch: the forward passes of each optimizer step that it feeds."""
        self.step_guard = StepGuard(self.accelerator)
        self.args.logging_nan_inf_filter = False  # it would log the mean of other steps in the place of a NaN
        self._ratio_stats = RatioStats()
        self._loss_inputs: MicroBatch | None = None
        self.trained_rows: TrainedRows | None = None
        """Where the trained tokens are written down."""
        self.phases = PhaseClock(self._metrics)
        self.add_callback(self.phases)
        self.policy_weights = PolicyWeights(
            self.vllm_generation.compute_dtype if self.use_vllm else find_pass_dtype(self.accelerator, self.model),
            seed=self.args.seed,
            dithered=self.args.weight_rounding == "dithered",
            is_deepspeed=self.is_deepspeed_enabled,
        )
        self.add_callback(self.policy_weights)
        _sum_gradients_in_float32(self.accelerator)

    def _collect_rows(self, inputs: list[dict[str, Any]], mode: str) -> list[Row]:
        """Rows of this rank for its data rows. A collective."""
        raise NotImplementedError

    # A step: rows, forward passes, gradients.

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One micro-step of transformers' loop; see the class for what happens in which."""
        started = time.perf_counter()
        model.train()
        per_generation = self.args.steps_per_generation
        if self._windows is None or self._step % (per_generation * self.num_iterations) == 0:
            rows = self._collect_rows(inputs, "train")
            with self.phases.measure("train", "planning"):
                self._windows = self._plan_windows(rows, "train")
        steps_per_window = self._steps_per_window()
        loss = torch.zeros((), device=self.accelerator.device)
        if (self._step + 1) % steps_per_window == 0:
            window = self._windows[self._step // steps_per_window % len(self._windows)]
            with self.phases.measure("train", "training"):
                loss = self._train_window(model, window, steps_per_window)
        self._step += 1
        self._current_train_step_time += time.perf_counter() - started
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return loss

    def _steps_per_window(self) -> int:
        """Micro-steps of a window: what a generation and an optimizer step can both be divided into."""
        return math.gcd(self.args.steps_per_generation, self.args.gradient_accumulation_steps)

    def _train_window(self, model: Any, window: list[MicroBatch], steps_per_window: int) -> Tensor:
        """Forward and backward of all passes; gradients are exchanged after the last one only."""
        self.step_guard.has_rows |= any("is_filler" not in micro_batch for micro_batch in window)
        if not self.step_guard.has_rows:
            window = []  # so far, there is no gradient to exchange
        loss = torch.zeros((), device=self.accelerator.device)
        num_micro_steps = self.current_gradient_accumulation_steps
        # TRL divides by the number of passes that an optimizer step has: here it is this
        self.current_gradient_accumulation_steps = len(window) * num_micro_steps // steps_per_window
        try:
            for number, micro_batch in enumerate(window):
                is_last = number == len(window) - 1
                with nullcontext() if is_last else self._no_gradient_exchange(model):
                    loss += super(GRPOTrainer, self).training_step(model, micro_batch, None)
        finally:
            self.current_gradient_accumulation_steps = num_micro_steps
        self._log_ratio_stats("train")
        self.step_guard.note(loss, (row["rollout"] for micro_batch in window for row in micro_batch["rows"]))
        return loss

    @contextmanager
    def _no_gradient_exchange(self, model: Any) -> Iterator[None]:
        # accelerate has DeepSpeed step at every pass that synchronises, and TRL adapts its entropy coefficient there
        state = self.accelerator.gradient_state
        before = state.sync_gradients
        state._set_sync_gradients(False)
        is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        try:
            with nullcontext() if is_deepspeed else self.accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(before)

    # Around transformers' optimizer step: whether it is made, and what is logged then.

    def _clip_grad_norm(self, model: Any) -> Any:
        """transformers'; without rows there is nothing to clip, and nothing that `GradScaler` could unscale."""
        return super()._clip_grad_norm(model) if self.step_guard.has_rows else None

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        """transformers', which asks for it right before the optimizer's step: the step is judged by it."""
        if self.step_guard.has_rows:
            grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
            grad_norm = None if grad_norm is None else float(grad_norm)
        else:
            grad_norm = 0.0
        self.step_guard.attach(self.optimizer)
        self.step_guard.judge(grad_norm, self.state.global_step + 1)
        self._metrics["train"]["polar/skipped_steps"].append(float(self.step_guard.fault is not None))
        return grad_norm

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """transformers', which begins the loss anew by taking it from itself, and so would log NaN for ever after."""
        if self.trained_rows is not None:
            if self.step_guard.fault is not None:
                self.trained_rows.forget()
            self.trained_rows.write_rows(self.state.global_step)
        total, logged = self._total_loss_scalar, self._globalstep_last_logged
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        if self._globalstep_last_logged > logged:
            tr_loss.zero_()
            if not math.isfinite(self._total_loss_scalar):
                self._total_loss_scalar = total

    def _prepare_inputs(self, inputs: MicroBatch) -> MicroBatch:
        """transformers' loop asks for every pass; ours are ready."""
        return inputs

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """The loss of an evaluation batch."""
        (window,) = self._plan_windows(self._collect_rows(inputs, "eval"), "eval")
        loss = torch.zeros((), device=self.accelerator.device)
        with torch.no_grad(), self.compute_loss_context_manager():
            for micro_batch in window:
                loss += self.compute_loss(model, micro_batch)
        self._log_ratio_stats("eval")
        return loss, None, None

    # From rows to forward passes.

    def _plan_windows(self, local_rows: list[Row], mode: str) -> list[list[MicroBatch]]:
        """This rank's passes of each optimizer step, as many as every other rank has. A collective."""
        rows: list[Row] = gather_object(local_rows)
        num_windows = 1
        if mode == "train":
            num_windows = self.args.steps_per_generation // self._steps_per_window()
        weights = row_weights(rows, loss_type=self.loss_type)
        if self.loss_type in ROLLOUT_MEAN_LOSSES:
            # the mean over a generation's rollouts is one over optimizer steps, each of which has its own part of them
            weights = [weight * num_windows for weight in weights]
        windows, plans = [], []
        for part in self._deal_rollouts(rows, num_windows):
            chosen = [rows[i] for i in part]
            plan = plan_micro_batches(
                [row.token_ids_T for row in chosen],
                num_ranks=self.accelerator.num_processes,
                max_tokens=1 if self.layout_kind == "single" else self.args.max_tokens_per_device,
                share_prefixes=self.layout_kind == "tree",
                cost=self._cost,
            )
            plans.append(plan)
            windows.append(self._build_window(chosen, [weights[i] for i in part], plan, mode))
        num_trainable = sum(row.num_trainable for row in rows)
        for window in windows:
            # TRL divides by this, times passes per optimizer step, over micro-steps per generation
            num_items = float(num_trainable)
            if mode == "train" and window:
                num_items *= self.args.steps_per_generation / num_windows / len(window)
            for micro_batch in window:
                micro_batch["num_items_in_batch"] = torch.tensor(num_items, device=self.accelerator.device)
            self._add_reference_logps(window, mode)
        metrics = self._metrics[mode]
        metrics["polar/trained_tokens"].append(num_trainable)
        metrics["polar/forwarded_tokens"].append(sum(plan.forwarded_tokens for plan in plans))
        metrics["polar/unique_tokens"].append(sum(plan.unique_tokens for plan in plans))
        metrics["polar/forward_passes"].append(sum(plan.num_micro_batches for plan in plans))
        metrics["polar/rank_imbalance"].append(max(_imbalance(plan.costs_R) for plan in plans))
        return windows

    def _build_window(self, rows: Sequence[Row], weights: Sequence[float], plan: Plan, mode: str) -> list[MicroBatch]:
        """This rank's passes over its share of the rows, whose losses weigh `weights`."""
        mine = plan.micro_batches[self.accelerator.process_index]
        if not mine and mode == "train" and self.args.gradient_accumulation_steps > self._steps_per_window():
            # others of this optimizer step may have rows, and gradients are exchanged in the last of them
            empty = build_micro_batch([], [], num_rows=1, kind=self.layout_kind, device=self.accelerator.device)
            return [{**empty, "rows": [], "is_filler": True}]
        window = []
        for number, members in enumerate(mine):
            num_rows = max(1, *(len(theirs[number]) for theirs in plan.micro_batches))
            factor = 1.0
            if self.loss_type in ROLLOUT_MEAN_LOSSES:
                # TRL's mean over rows of a pass, over passes and over ranks becomes the sum that the weights mean
                factor = float(num_rows * self.accelerator.num_processes * (len(mine) if mode == "train" else 1))
            micro_batch = build_micro_batch(
                [rows[i] for i in members],
                [weights[i] * factor for i in members],
                num_rows=num_rows,
                kind=self.layout_kind,
                device=self.accelerator.device,
            )
            micro_batch["rows"] = [describe_row(rows[i]) for i in members]
            window.append(micro_batch)
        return window

    def _deal_rollouts(self, rows: Sequence[Row], num_windows: int) -> list[list[int]]:
        """Indices of rows for each optimizer step; rollouts stay whole, and all ranks deal alike."""
        rollouts = list(dict.fromkeys(row.rollout_id for row in rows))
        generator = torch.Generator().manual_seed(self.args.seed + self.state.global_step)
        order = torch.randperm(len(rollouts), generator=generator).tolist()
        window_of = {rollouts[index]: place % num_windows for place, index in enumerate(order)}
        return [
            [index for index, row in enumerate(rows) if window_of[row.rollout_id] == window]
            for window in range(num_windows)
        ]

    @torch.no_grad()
    def _add_reference_logps(self, window: list[MicroBatch], mode: str) -> None:
        """Log-probabilities that the loss needs beside its own forward pass, only where they differ from it."""
        uses_per_generation = self.args.steps_per_generation * self.num_iterations
        off_policy = mode == "train" and self.args.gradient_accumulation_steps % uses_per_generation != 0
        if not off_policy and self.beta == 0.0:
            return
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            for micro_batch in window:
                if off_policy:
                    micro_batch["old_per_token_logps"] = self._score(self.model, micro_batch)[0]
                if self.beta != 0.0:
                    micro_batch["ref_per_token_logps"] = self._reference_logps(micro_batch)

    def _reference_logps(self, micro_batch: MicroBatch) -> Tensor:
        if self.ref_model is not None:
            return self._score(self.ref_model, micro_batch)[0]
        # a new adapter switched off is the reference; one that training began with was kept as "ref"
        peft_model = self.accelerator.unwrap_model(self.model)
        with use_adapter(peft_model, adapter_name="ref" if "ref" in peft_model.peft_config else None):
            return self._score(self.model, micro_batch)[0]

    # Inside TRL's loss.

    def _score(self, model: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        with self.accelerator.autocast():
            logps_S, entropies_S = score(model, micro_batch["packed"])
        return to_rows(logps_S, micro_batch), to_rows(entropies_S, micro_batch)

    def _compute_loss(self, model: Any, inputs: MicroBatch) -> Tensor:
        self._loss_inputs = inputs
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._loss_inputs = None

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
        """Log-probabilities and entropies [B, C] of the pass whose loss TRL is computing.

        TRL scores a batch once more, without gradients, only to have its ratio to the sampling policy. As long as the
        policy has not moved since it sampled, the loss's own pass gives the same numbers, so that one is saved.
        """
        assert self._loss_inputs is not None
        inputs = self._loss_inputs
        logps_BC, entropies_BC = self._score(model, inputs)
        trainer_BC = inputs.get("old_per_token_logps", logps_BC.detach())
        mask_BC = inputs["completion_mask"]
        inputs["importance_sampling_ratio"] = importance_ratio(
            trainer_BC,
            inputs["sampling_per_token_logps"],
            mask_BC,
            mode=self.vllm_importance_sampling_mode,
            clip_min=self.vllm_importance_sampling_clip_min,
            clip_max=self.vllm_importance_sampling_clip_max,
        )
        self._ratio_stats.add(trainer_BC, inputs["sampling_per_token_logps"], mask_BC)
        if self.trained_rows is not None and model.training:
            self.trained_rows.note(inputs["rows"], trainer_BC)
        return logps_BC, entropies_BC, None

    def _log_ratio_stats(self, mode: str) -> None:
        """How far the training policy is from the one that sampled, over the step's tokens. A collective."""
        stats, self._ratio_stats = self._ratio_stats, RatioStats()
        figures = stats.summarise(
            self.accelerator,
            clip_min=self.vllm_importance_sampling_clip_min,
            clip_max=self.vllm_importance_sampling_clip_max,
        )
        for name, value in figures.items():
            self._metrics[mode][f"sampling/{name}"].append(value)


def _sum_gradients_in_float32(accelerator: Any) -> None:
    """Over passes and ranks, under FSDP2, where accelerate would have them summed in the pass's half precision."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)


def _build_cost_model(model: Any) -> CostModel:
    embeddings = {id(module.weight) for module in (model.get_input_embeddings(),) if module is not None}
    num_parameters = sum(p.numel() for p in model.parameters() if id(p) not in embeddings)
    return CostModel.of(model.config, num_parameters)


def _imbalance(costs_R: Sequence[float]) -> float:
    """How much longer the slowest rank takes than the mean."""
    mean = sum(costs_R) / len(costs_R)
    return max(costs_R) / mean - 1.0 if mean else 0.0
