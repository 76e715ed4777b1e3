"""TRL's GRPO on rows of any length: what a step costs is what its tokens cost.

Rows of all ranks are spread over ranks and forward passes by predicted cost and forwarded without padding, shared
prefixes once. The losses are TRL's, over the rollouts of an optimizer step. It knows nothing of agents, and of an
engine only what it computes in: a subclass says where rows come from (`_collect_rows`). It refuses to let ranks run
different numbers of forward passes, which would leave collectives waiting for ever.
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

from polar_trl.engine.rounding import find_pass_dtype
from polar_trl.errors import ConfigError
from polar_trl.grpo.config import PackedGRPOConfig
from polar_trl.grpo.logs.phases import PhaseClock
from polar_trl.grpo.logs.trained_rows import TrainedRows, describe_row
from polar_trl.grpo.loss.importance import RatioStats
from polar_trl.grpo.loss.rollout_terms import add_rollout_terms, needs_rollout_terms
from polar_trl.grpo.loss.token_loss import LossFigures, MicroBatch, token_losses
from polar_trl.grpo.packing.balance import CostModel, plan_micro_batches
from polar_trl.grpo.packing.batch import build_micro_batch, to_rows
from polar_trl.grpo.packing.forward import choose_layout, prepare_model, score
from polar_trl.grpo.packing.supported import find_causal_model
from polar_trl.grpo.rows import Row, rollout_tokens, token_shares
from polar_trl.grpo.weights.policy_weights import PolicyWeights
from polar_trl.grpo.weights.step_guard import StepGuard


class PackedGRPOTrainer(GRPOTrainer):
    """GRPO whose forward passes are filled by tokens. Arguments are TRL's.

    A generation batch of TRL is collected in its first micro-step, and its rollouts are dealt to windows: what an
    optimizer step and a generation batch can both be divided into. The forward passes of an optimizer step, as many as
    its tokens need, all run in its last micro-step; with no rows there is none,
    and no optimizer step either.

    A generation's loss is the mean over its windows of the one that `token_shares` declares; as in TRL, the loss of an
    optimizer step is the mean over its windows, so over generations where several feed it. Generations without rows
    are left out of it.
    """

    args: PackedGRPOConfig
    accelerator: Any
    model: Any
    num_iterations: int
    entropy_coef: float
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
        self._pending: list[list[MicroBatch]] = []
        """Windows of the optimizer step that is under way."""
        self._micro_steps = 0
        """Of that step."""
        self.step_guard = StepGuard(self.accelerator)
        self.args.logging_nan_inf_filter = False  # it would log the mean of other steps in the place of a NaN
        self._ratio_stats = RatioStats()
        self._figures = LossFigures()
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
        if (self._step + 1) % steps_per_window == 0 and any(self._windows):
            self._pending.append(self._windows[self._step // steps_per_window % len(self._windows)])
        self._step += 1
        self._micro_steps += 1
        loss = torch.zeros((), device=self.accelerator.device)
        is_last = self._micro_steps >= self.current_gradient_accumulation_steps
        if is_last:
            windows, self._pending, self._micro_steps = self._pending, [], 0
            with self.phases.measure("train", "training"):
                loss = self._train_window(model, self._prepare_passes(windows))
        self._current_train_step_time += time.perf_counter() - started
        if is_last:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return loss

    def _steps_per_window(self) -> int:
        """Micro-steps of a window: what a generation and an optimizer step can both be divided into."""
        return math.gcd(self.args.steps_per_generation, self.args.gradient_accumulation_steps)

    def _prepare_passes(self, windows: Sequence[Sequence[MicroBatch]]) -> list[MicroBatch]:
        """The passes of a step (or of an evaluation batch) with what their loss needs to know of all of it."""
        passes = [micro_batch for window in windows for micro_batch in window]
        if passes and needs_rollout_terms(self.args, corrects=self._corrects):
            with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
                add_rollout_terms(
                    windows,
                    lambda micro_batch: self._score(self.model, micro_batch),
                    self.args,
                    corrects=self._corrects,
                    accelerator=self.accelerator,
                )
        num_explored = torch.zeros((), device=self.accelerator.device)
        for micro_batch in passes:
            num_explored += micro_batch["entropy_mask" if "entropy_mask" in micro_batch else "completion_mask"].sum()
        if passes and self._entropy_bonus_enabled:
            num_explored = self.accelerator.reduce(num_explored, reduction="sum")
        for micro_batch in passes:
            micro_batch |= {"num_windows": len(windows), "num_explored": num_explored.clamp(min=1.0)}
        return passes

    @property
    def _corrects(self) -> bool:
        return bool(self.use_vllm and self.args.vllm_importance_sampling_correction)

    def _train_window(self, model: Any, passes: list[MicroBatch]) -> Tensor:
        """Forward and backward of all passes of a step; gradients are exchanged after the last one only."""
        self.step_guard.has_rows = bool(passes)  # as many on every rank, and none where no rank has rows
        loss = torch.zeros((), device=self.accelerator.device)
        for number, micro_batch in enumerate(passes):
            is_last = number == len(passes) - 1
            with nullcontext() if is_last else self._no_gradient_exchange(model):
                loss += super(GRPOTrainer, self).training_step(model, micro_batch, None)
        self._log_loss("train")
        self.step_guard.note(loss, (row["rollout"] for micro_batch in passes for row in micro_batch["rows"]))
        return loss

    @contextmanager
    def _no_gradient_exchange(self, model: Any) -> Iterator[None]:
        # accelerate has DeepSpeed step at every pass that synchronises
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
        windows = self._plan_windows(self._collect_rows(inputs, "eval"), "eval")
        loss = torch.zeros((), device=self.accelerator.device)
        with torch.no_grad(), self.compute_loss_context_manager():
            for micro_batch in self._prepare_passes(windows):
                loss += self.compute_loss(model, micro_batch)
        self._log_loss("eval")
        return loss, None, None

    # From rows to forward passes.

    def _plan_windows(self, local_rows: list[Row], mode: str) -> list[list[MicroBatch]]:
        """This rank's passes of each optimizer step, as many as every other rank has. A collective."""
        rows: list[Row] = gather_object(local_rows)
        num_windows = 1
        if mode == "train":
            num_windows = self.args.steps_per_generation // self._steps_per_window()
        # a generation's loss is the mean over its windows, each of which has its own part of the rollouts
        shares = token_shares(
            rows, loss_type=self.args.loss_type, max_completion_length=self.args.max_completion_length
        )
        shares = [share * num_windows for share in shares]
        tokens = rollout_tokens(rows)
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
            mine = plan.micro_batches[self.accelerator.process_index]
            triples = [(rows[i], shares[i], tokens[i]) for i in part]
            windows.append([self._build_pass([triples[i] for i in members]) for members in mine])
            self._add_reference_logps(windows[-1], mode)
        metrics = self._metrics[mode]
        metrics["polar/trained_tokens"].append(sum(row.num_trainable for row in rows))
        metrics["polar/forwarded_tokens"].append(sum(plan.forwarded_tokens for plan in plans))
        metrics["polar/unique_tokens"].append(sum(plan.unique_tokens for plan in plans))
        metrics["polar/forward_passes"].append(sum(plan.num_micro_batches for plan in plans))
        metrics["polar/rank_imbalance"].append(max(_imbalance(plan.costs_W) for plan in plans))
        return windows

    def _build_pass(self, members: Sequence[tuple[Row, float, int]]) -> MicroBatch:
        """A pass over rows, with the share of each row's tokens and the tokens of its rollout."""
        rows, shares, tokens = zip(*members, strict=True) if members else ((), (), ())
        micro_batch = build_micro_batch(rows, shares, tokens, kind=self.layout_kind, device=self.accelerator.device)
        return micro_batch | {"rows": [describe_row(row) for row in rows]}

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

    # The loss of a pass.

    def _score(self, model: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        with self.accelerator.autocast():
            logps_S, entropies_S = score(model, micro_batch["packed"])
        return to_rows(logps_S, micro_batch), to_rows(entropies_S, micro_batch)

    def _compute_loss(self, model: Any, inputs: MicroBatch) -> Tensor:
        """What a pass adds to its step's loss, times the number of ranks, over which gradients are averaged."""
        logps_BC, entropies_BC = self._score(model, inputs)
        mask_BC = inputs["completion_mask"]
        losses_BC, figures = token_losses(logps_BC, inputs, self.args, corrects=self._corrects)
        loss = (losses_BC * mask_BC * inputs["shares"][:, None]).sum() / inputs["num_windows"]
        if self._entropy_bonus_enabled:
            self._figures.add_part("policy_loss", loss)
            explored_BC = inputs.get("entropy_mask", mask_BC)
            self._figures.add("explored_entropy", entropies_BC, explored_BC)
            loss = loss - self._entropy_weight() * (entropies_BC * explored_BC).sum() / inputs["num_explored"]
        self._figures.add("entropy", entropies_BC, mask_BC)
        for name, (values_BC, weights_BC) in figures.items():
            self._figures.add(name, values_BC, weights_BC)
        trainer_BC = inputs.get("old_per_token_logps", logps_BC.detach())
        self._ratio_stats.add(trainer_BC, inputs["sampling_per_token_logps"], mask_BC)
        if self.trained_rows is not None and self.model.training:
            self.trained_rows.note(inputs["rows"], trainer_BC)
        return loss * self.accelerator.num_processes

    def _entropy_weight(self) -> float:
        """The bonus's coefficient as the last step left it; TRL gives none while entropy is above the target."""
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            return 0.0
        return float(self.entropy_coef)

    def _adapt_entropy(self, entropy: float) -> None:
        """TRL's controller: the next step's coefficient goes up where this one's entropy (nats) is low."""
        args, self._last_world_entropy = self.args, entropy
        delta = args.entropy_coef_delta if entropy <= args.entropy_target else -args.entropy_coef_delta
        self.entropy_coef = min(max(self.entropy_coef + delta, args.entropy_coef_min), args.entropy_coef_max)

    def _log_loss(self, mode: str) -> None:
        """Figures of the loss, and how far the trained policy is from the one that sampled, over all tokens of a step
        or an evaluation batch. A collective."""
        figures, self._figures = self._figures.summarize(self.accelerator), LossFigures()
        explored = figures.pop("explored_entropy", None)
        if explored is not None and mode == "train":
            if self.use_adaptive_entropy:
                self._adapt_entropy(explored)
            figures["entropy_coef"] = self.entropy_coef
        stats, self._ratio_stats = self._ratio_stats, RatioStats()
        ratios = stats.summarize(
            self.accelerator,
            clip_min=self.vllm_importance_sampling_clip_min,
            clip_max=self.vllm_importance_sampling_clip_max,
        )
        for name, value in {**figures, **{f"sampling/{name}": value for name, value in ratios.items()}}.items():
            self._metrics[mode][name].append(value)


def _sum_gradients_in_float32(accelerator: Any) -> None:
    """Over passes and ranks, under FSDP2, where accelerate would have them summed in the pass's half precision."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)


def _build_cost_model(model: Any) -> CostModel:
    embeddings = {id(module.weight) for module in (model.get_input_embeddings(),) if module is not None}
    num_parameters = sum(p.numel() for p in model.parameters() if id(p) not in embeddings)
    return CostModel.of(model.config, num_parameters)


def _imbalance(costs_W: Sequence[float]) -> float:
    """How much longer the slowest rank takes than the mean."""
    mean = sum(costs_W) / len(costs_W)
    return max(costs_W) / mean - 1.0 if mean else 0.0
