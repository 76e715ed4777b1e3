"""Give the private state of TRL's trainer names of our own.

`StepGuard` (accelerate's optimizer), `ColocatedVllm` and `CompletionsTable` touch other private names.
`tests/grpo/test_contract.py` pins all of them, and the signatures of the methods that the trainer overrides, so that
an upgrade that moves one fails there and nowhere else.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import Trainer


class Forwarded:
    """An attribute of the trainer, under a name of ours."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, bridge: "TrlBridge", owner: type) -> Any:
        return getattr(bridge.trainer, self._name)

    def __set__(self, bridge: "TrlBridge", value: Any) -> None:
        setattr(bridge.trainer, self._name, value)


class TrlBridge:
    """The private state of a `GRPOTrainer`, under names of our own.

    Args:
        trainer: Initialized by TRL.
    """

    state = Forwarded("state")
    """transformers' state; another object in each training."""
    model = Forwarded("model")
    """The policy, as it is wrapped at the moment."""
    tokenizer = Forwarded("_tokenizer")
    """Of the processing class."""
    micro_step = Forwarded("_step")
    """Micro-steps so far, those before a restart included; `TrainingStep.run` decides by it when to roll out."""
    micro_steps_per_step = Forwarded("current_gradient_accumulation_steps")
    """Of the optimizer step that is under way: an epoch's last one may have fewer."""
    loaded_step = Forwarded("_last_loaded_step")
    """Optimizer step whose weights the engine has; -1: none."""
    entropy_coef = Forwarded("entropy_coef")
    """Coefficient of the entropy bonus; the adaptive one moves with each step."""
    has_entropy_bonus = Forwarded("_entropy_bonus_enabled")
    """Whether the loss has TRL's entropy bonus."""
    last_entropy = Forwarded("_last_world_entropy")
    """Mean entropy of the last step over all ranks (nats), which TRL's controller compares with its target."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""
        return int(self.trainer.state.global_step)

    # Metrics.

    def metrics(self, mode: str) -> MutableMapping[str, list[float]]:
        """Return the values that wait for the next line of the log, which holds the mean of each list."""
        values: MutableMapping[str, list[float]] = self.trainer._metrics[mode]
        return values

    def log(self, mode: str, figures: MutableMapping[str, float]) -> None:
        """Append a value to each metric."""
        for name, value in figures.items():
            self.trainer._metrics[mode][name].append(value)

    def name_metrics(self, mode: str, prefix: str) -> None:
        """Put a prefix before the names of the metrics that wait for the next line of the log."""
        values = {f"{prefix}{name}": given for name, given in self.trainer._metrics[mode].items()}
        self.trainer._metrics[mode].clear()
        self.trainer._metrics[mode].update(values)

    def take_logged_metrics(self) -> dict[str, list[float]]:
        """Return what reward functions logged through TRL's `log_metric`, and forget it."""
        values = {name: list(given) for name, given in self.trainer._pending_metrics.items()}
        self.trainer._pending_metrics.clear()
        return values

    def take_extra_columns(self) -> dict[str, list[Any]]:
        """Return what reward functions logged through TRL's `log_extra`, and forget it."""
        columns = {name: list(values) for name, values in self.trainer._pending_extra_logs.items()}
        self.trainer._pending_extra_logs.clear()
        return columns

    # Rewards.

    def calculate_rewards(
        self,
        rows: list[dict[str, Any]],
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
    ) -> Tensor:
        """Return [R, F] rewards of all ranks' rollouts by TRL's reward functions (a collective)."""
        rewards_RF: Tensor = self.trainer._calculate_rewards(rows, prompts, completions, completion_ids)
        return rewards_RF

    def drop_first_reward_function(self) -> None:
        """Have TRL not call the first of its reward functions; whoever does keeps its name and weight."""
        for functions in (self.trainer.reward_funcs, self.trainer.reward_processing_classes):
            del functions[0]
        del self.trainer.reward_func_names[0]

    # Steps.

    def log_step_time(self, seconds: float, *, is_last: bool) -> None:
        """Add the time of a micro-step; the last one of an optimizer step logs their sum."""
        self.trainer._current_train_step_time += seconds
        if is_last:
            self.log("train", {"step_time": self.trainer._current_train_step_time})
            self.trainer._current_train_step_time = 0.0

    def run_pass(self, model: Any, micro_batch: dict[str, Any]) -> Tensor:
        """Run the forward and backward pass of transformers' own trainer, which asks for `_compute_loss`."""
        loss: Tensor = Trainer.training_step(self.trainer, model, micro_batch, None)
        return loss

    def compute_loss(self, model: Any, micro_batch: dict[str, Any]) -> Tensor:
        """Run a forward pass without gradients, as an evaluation of transformers' trainer does."""
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            loss: Tensor = self.trainer.compute_loss(model, micro_batch)
        return loss

    @contextmanager
    def no_gradient_exchange(self, model: Any) -> Iterator[None]:
        """Keep the gradients of passes inside on their rank."""
        accelerator = self.trainer.accelerator
        # accelerate has DeepSpeed step at every pass that synchronizes
        state = accelerator.gradient_state
        before = state.sync_gradients
        state._set_sync_gradients(False)
        is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        try:
            with nullcontext() if is_deepspeed else accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(before)

    @contextmanager
    def restarted_loss(self, tr_loss: Tensor) -> Iterator[None]:
        """Begin the logged loss anew if a line is logged inside, also after a loss that was NaN.

        transformers begins it anew by taking it from itself, and so would log NaN for ever after.
        """
        trainer = self.trainer
        total, logged = trainer._total_loss_scalar, trainer._globalstep_last_logged
        yield
        if trainer._globalstep_last_logged > logged:
            tr_loss.zero_()
            if not abs(trainer._total_loss_scalar) < float("inf"):
                trainer._total_loss_scalar = total

    # The loss, and the engine's weights.

    @property
    def corrects_ratio(self) -> bool:
        """True if the loss corrects for the ratio to the policy that sampled."""
        trainer = self.trainer
        return bool(trainer.use_vllm and trainer.args.vllm_importance_sampling_correction)

    @property
    def weights_sleep(self) -> bool:
        """True if the engine dropped its weights when it went to sleep."""
        return bool(self.trainer.vllm_generation._llm_weights_sleeping)

    def output_dir(self, trial: Any) -> str:
        """Folder of the checkpoints."""
        return str(self.trainer._get_output_dir(trial=trial))
