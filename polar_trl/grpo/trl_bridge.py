"""Hold every private name of TRL, transformers and accelerate that a training step reads, writes or calls.

`tests/grpo/test_contract.py` pins each of them, and the signatures of the methods that the trainer overrides, so that
an upgrade that moves one fails there and nowhere else.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import Trainer


class TrlBridge:
    """The private state of a `GRPOTrainer`, under names of our own.

    Args:
        trainer: Initialized by TRL.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    # Metrics.

    def metrics(self, mode: str) -> MutableMapping[str, list[float]]:
        """Values that wait for the next line of the log, which holds the mean of each list."""
        values: MutableMapping[str, list[float]] = self._trainer._metrics[mode]
        return values

    def log(self, mode: str, figures: MutableMapping[str, float]) -> None:
        """Append a value to each metric."""
        for name, value in figures.items():
            self._trainer._metrics[mode][name].append(value)

    def take_logged_metrics(self) -> dict[str, list[float]]:
        """Return what reward functions logged through TRL's `log_metric`, and forget it."""
        values = {name: list(given) for name, given in self._trainer._pending_metrics.items()}
        self._trainer._pending_metrics.clear()
        return values

    def take_extra_columns(self) -> dict[str, list[Any]]:
        """Return what reward functions logged through TRL's `log_extra`, and forget it."""
        columns = {name: list(values) for name, values in self._trainer._pending_extra_logs.items()}
        self._trainer._pending_extra_logs.clear()
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
        rewards_RF: Tensor = self._trainer._calculate_rewards(rows, prompts, completions, completion_ids)
        return rewards_RF

    def drop_first_reward_function(self) -> None:
        """Have TRL not call the first of its reward functions; whoever does keeps its name and weight."""
        for functions in (self._trainer.reward_funcs, self._trainer.reward_processing_classes):
            del functions[0]
        del self._trainer.reward_func_names[0]

    # Steps.

    @property
    def state(self) -> Any:
        """transformers' state; another object in each training."""
        return self._trainer.state

    @property
    def model(self) -> Any:
        """The policy, as it is wrapped at the moment."""
        return self._trainer.model

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""
        return int(self._trainer.state.global_step)

    @property
    def micro_step(self) -> int:
        """Micro-steps so far, in all processes of the run; TRL rolls out by it."""
        return int(self._trainer._step)

    @micro_step.setter
    def micro_step(self, value: int) -> None:
        self._trainer._step = value

    def log_step_time(self, seconds: float, *, is_last: bool) -> None:
        """Add the time of a micro-step; the last one of an optimizer step logs their sum."""
        self._trainer._current_train_step_time += seconds
        if is_last:
            self.log("train", {"step_time": self._trainer._current_train_step_time})
            self._trainer._current_train_step_time = 0.0

    @property
    def micro_steps_per_step(self) -> int:
        """Of the optimizer step that is under way: an epoch's last one may have fewer."""
        return int(self._trainer.current_gradient_accumulation_steps)

    def run_pass(self, model: Any, micro_batch: dict[str, Any]) -> Tensor:
        """Run the forward and backward pass of transformers' own trainer, which asks for `_compute_loss`."""
        loss: Tensor = Trainer.training_step(self._trainer, model, micro_batch, None)
        return loss

    def compute_loss(self, model: Any, micro_batch: dict[str, Any]) -> Tensor:
        """Run a forward pass without gradients, as an evaluation of transformers' trainer does."""
        with torch.no_grad(), self._trainer.compute_loss_context_manager():
            loss: Tensor = self._trainer.compute_loss(model, micro_batch)
        return loss

    @contextmanager
    def no_gradient_exchange(self, model: Any) -> Iterator[None]:
        """Keep the gradients of passes inside on their rank."""
        accelerator = self._trainer.accelerator
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
        trainer = self._trainer
        total, logged = trainer._total_loss_scalar, trainer._globalstep_last_logged
        yield
        if trainer._globalstep_last_logged > logged:
            tr_loss.zero_()
            if not abs(trainer._total_loss_scalar) < float("inf"):
                trainer._total_loss_scalar = total

    # The loss.

    @property
    def corrects_ratio(self) -> bool:
        """Whether the loss corrects for the ratio to the policy that sampled."""
        trainer = self._trainer
        return bool(trainer.use_vllm and trainer.args.vllm_importance_sampling_correction)

    @property
    def entropy_coef(self) -> float:
        """Coefficient of the entropy bonus; the adaptive one moves with each step."""
        return float(self._trainer.entropy_coef)

    @entropy_coef.setter
    def entropy_coef(self, value: float) -> None:
        self._trainer.entropy_coef = value

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the loss has TRL's entropy bonus."""
        return bool(self._trainer._entropy_bonus_enabled)

    @property
    def last_entropy(self) -> float:
        """Mean entropy of the last step over all ranks (nats), which TRL's controller compares with its target."""
        return float(self._trainer._last_world_entropy)

    @last_entropy.setter
    def last_entropy(self, value: float) -> None:
        self._trainer._last_world_entropy = value

    # The engine's weights.

    @property
    def loaded_step(self) -> int:
        """Optimizer step whose weights the engine has; -1 for others."""
        return int(self._trainer._last_loaded_step)

    @loaded_step.setter
    def loaded_step(self, value: int) -> None:
        self._trainer._last_loaded_step = value

    @property
    def weights_sleep(self) -> bool:
        """Whether the engine dropped its weights when it went to sleep."""
        return bool(self._trainer.vllm_generation._llm_weights_sleeping)

    # Data and folders.

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, by the trained model's tokenizer."""
        return [self._trainer._tokenizer(text)["input_ids"] for text in texts]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the processing class."""
        return self._trainer._tokenizer

    def output_dir(self, trial: Any) -> str:
        """Folder of the checkpoints."""
        return str(self._trainer._get_output_dir(trial=trial))
