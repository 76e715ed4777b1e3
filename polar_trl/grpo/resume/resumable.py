"""A trainer that was killed -> the same trainer, going on from its last complete checkpoint.

transformers restores weights, optimizer, schedule, random numbers and log, and skips the batches that were trained.
What is added here: checkpoints that say whether they are whole, the order of tasks beyond the first epoch, TRL's place
within a generation batch with the rows that were rolled out and not trained yet, and numbers of batches and policies
that go on. It refuses to go on where tasks would come in another order.
"""

import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from trl import GRPOTrainer

from polar_trl.errors import ConfigError
from polar_trl.grpo.logs.trained_log import TrainedLog, rewind_trained
from polar_trl.grpo.resume import checkpoint
from polar_trl.grpo.resume.checkpoint import RankState, RunState
from polar_trl.grpo.weights.step_guard import StepGuard

_SETTINGS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
    "shuffle_dataset",
    "seed",
)
_BATCH_FOLDER = re.compile(r"(?:train|eval)_(\d+)")


class ResumableTrainer(GRPOTrainer):
    """A mixin in front of the trainer that rolls out.

    That trainer has `_num_batches` (rolled out so far), `_windows` (of the last generation batch), `upcoming`,
    `carry_over`, `proxy`, `step_guard` and `vllm_generation.engine`. A forward pass has the key "rows": what
    `describe_row` says of each of its rows.
    """

    _num_batches: int
    _windows: list[list[dict[str, Any]]] | None
    step_guard: StepGuard
    _epochs_done = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trained = TrainedLog(Path(self.args.output_dir))
        self.add_callback(self.trained)
        self.seconds_before = 0.0
        """Wall time of the run before this process, without what was lost to kills (s)."""
        self._started = time.monotonic()

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """TRL's.

        Args:
            resume_from_checkpoint: "auto" or True goes on from the newest complete checkpoint of `output_dir`, or
                begins if there is none; a path goes on from that one; None begins.

        Raises:
            ConfigError: the checkpoint is not whole, or the settings would change the order of tasks.
        """
        output_dir = Path(self.args.output_dir)
        self._last_loaded_step = -1  # TRL's: the engine has the weights of an evaluation, or of an earlier training
        folder = checkpoint.choose_checkpoint(output_dir, resume_from_checkpoint)
        step = 0
        if folder is not None:
            checkpoint.know_cpu_devices()
            state, rank_state = checkpoint.load_state(folder, self.accelerator.process_index, self.accelerator.device)
            checkpoint.require_same_settings(state.settings, self._describe_settings())
            if self.args.ignore_data_skip:
                raise ConfigError("ignore_data_skip must be false to resume: tasks that were trained would come again")
            self._restore(state, rank_state)
            self.policy_weights.resume(checkpoint.load_masters(folder, self.accelerator.process_index))
            step = state.step
        # all ranks have chosen before one of them removes anything
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoint.remove_partial(output_dir)
            rewind_trained(output_dir, source=output_dir if folder is None else folder.parent, step=step)
        self._skip_used_numbers(output_dir)
        if folder is not None and self.carry_over is not None:
            self.proxy.hold()  # until the engine has the checkpoint's weights
            self.carry_over.reopen(rank_state.open_rows)
        self._started = time.monotonic()
        return super().train(resume_from_checkpoint=None if folder is None else str(folder), **kwargs)

    def _restore(self, state: RunState, rank_state: RankState) -> None:
        self._step = state.micro_step
        self._epochs_done = state.epochs
        self._num_batches = state.num_batches
        self._windows = list(rank_state.windows) or None
        self.vllm_generation.engine.policy_version = state.policy_version
        self.seconds_before = state.seconds
        if self.upcoming is not None:
            self.upcoming.skip(state.micro_step)

    def _skip_used_numbers(self, output_dir: Path) -> None:
        """Batches that were rolled out and lost keep their numbers, so that an id names one session (a collective)."""
        folders = (_BATCH_FOLDER.fullmatch(path.name) for path in output_dir.glob("sessions/*/*"))
        used = [max((int(match[1]) + 1 for match in folders if match), default=0)]
        self._num_batches = max(self._num_batches, broadcast_object_list(used)[0])

    def _describe_settings(self) -> dict[str, Any]:
        tasks = "\n".join(json.loads(row)["id"] for row in self.train_dataset["task"])
        return {
            "num_processes": self.accelerator.num_processes,
            **{name: getattr(self.args, name) for name in _SETTINGS},
            "sequence_layout": self.layout_kind,  # of the forward passes that are saved
            "tasks": hashlib.sha256(tasks.encode("utf-8", "surrogatepass")).hexdigest()[:16],
        }

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """TRL's, past the shuffles of earlier epochs: each draws from one generator, which a new process has anew."""
        sampler = super()._get_train_sampler(dataset)
        for _ in range(self._epochs_done if sampler.shuffle else 0):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """transformers would make one more step after the last one of a run that is over."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _train_window(self, model: Any, window: list[dict[str, Any]], *args: Any) -> Any:
        loss = super()._train_window(model, window, *args)
        rows = gather_object([(row["rollout"], row["num_trainable"]) for passed in window for row in passed["rows"]])
        self.trained.note((rollout_id for rollout_id, _ in rows), num_tokens=sum(count for _, count in rows))
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        grad_norm = super()._get_grad_norm(*args, **kwargs)
        if self.step_guard.fault is not None:
            self.trained.skip(self.step_guard.fault)
        return grad_norm

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """transformers' own files, then ours, then the one that makes it a checkpoint (a collective)."""
        output_dir = Path(self._get_output_dir(trial=trial))
        folder = output_dir / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            checkpoint.begin_checkpoint(folder)
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # the older ones are still needed
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        rank, rounded = self.accelerator.process_index, self.policy_weights.rounded
        checkpoint.save_rank_state(folder, rank, self._get_rank_state())
        if rounded is not None and (rank == 0 or rounded.is_sharded):
            checkpoint.save_masters(folder, rank, rounded.state_dict())
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoint.finish_checkpoint(folder, self._get_run_state(), is_resumable=not self.args.save_only_model)
            checkpoint.rotate_checkpoints(output_dir, limit=limit, best=self.state.best_model_checkpoint)

    def _get_rank_state(self) -> RankState:
        is_used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        return RankState(
            windows=() if is_used_up else self._windows or (),
            open_rows=() if self.carry_over is None else self.carry_over.open_rows(),
        )

    def _get_run_state(self) -> RunState:
        return RunState(
            step=self.state.global_step,
            micro_step=self._step,
            epochs=int(self.state.epoch),
            num_batches=self._num_batches,
            policy_version=self.vllm_generation.engine.policy_version,
            seconds=self.seconds_before + time.monotonic() - self._started,
            settings=self._describe_settings(),
        )
