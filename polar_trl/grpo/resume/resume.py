"""Resume a killed run from its last complete checkpoint, exactly where it stood.

transformers restores weights, optimizer, schedule, random numbers and log, and skips the batches that were trained.
Added here: checkpoints that say whether they are whole, the order of tasks beyond the first epoch, TRL's place within
a generation batch with the rows that were rolled out and not trained yet, and numbers of batches and policies that go
on. A run whose tasks would come in another order is refused (`ConfigError`).
"""

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from polar_trl.engine.vllm import VllmEngine
from polar_trl.errors import ConfigError
from polar_trl.grpo.logs.trained_log import rewind_trained
from polar_trl.grpo.resume import checkpoint
from polar_trl.grpo.resume.checkpoint import RankState, RunState
from polar_trl.grpo.rollouts.source import RolloutSource
from polar_trl.grpo.run.best import find_best
from polar_trl.grpo.run.machines import failing_together, require_alike
from polar_trl.grpo.step import TrainingStep
from polar_trl.grpo.trl_bridge import TrlBridge
from polar_trl.grpo.weights.policy_weights import PolicyWeights
from polar_trl.harness.base import Harness
from polar_trl.harness.mixed import MixedHarness

logger = logging.getLogger(__name__)

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


@dataclass(eq=False)
class Resume:
    """Reads the state of a run from checkpoints, and writes it into them.

    Args:
        args: The config.
        accelerator: Of the trainer.
        layout_kind: Of the forward passes that are saved.
        step: Has the windows that are not trained yet.
        rollouts: Has the number of the next batch, and the sessions that are open.
        engine: Has the policy version.
        policy_weights: Has the lower halves of the masters.
        is_used: Whether `output_dir` held a run before this trainer.
    """

    args: Any
    accelerator: Any
    trl: TrlBridge
    layout_kind: str
    step: TrainingStep
    rollouts: RolloutSource
    engine: VllmEngine
    policy_weights: PolicyWeights
    is_used: bool
    _epochs_done: int = field(default=0, init=False)
    _started: float = field(default_factory=time.monotonic, init=False)
    seconds_before: float = field(default=0.0, init=False)
    """Wall time of the run before this process, without what was lost to kills (s)."""

    def begin(self, resume_from_checkpoint: str | bool | None) -> Path | None:
        """Restore the state of a checkpoint and return its folder, or None where the run begins (a collective).

        Args:
            resume_from_checkpoint: As `PolarGRPOTrainer.train` takes it.

        Raises:
            ConfigError: the checkpoint is not whole, the settings would change the order of tasks, or a run would
                begin in the folder of another.
        """
        output_dir, rank = Path(self.args.output_dir), self.accelerator.process_index
        self.trl.loaded_step = -1  # the engine has the weights of an evaluation, or of an earlier training
        choose = checkpoint.choose_start if self.is_used else checkpoint.choose_checkpoint
        with failing_together():
            folder, self.is_used = choose(output_dir, resume_from_checkpoint), False
            read = None if folder is None else (folder, *self._read(folder))
        chosen = read and f"{read[0].name}, written after {read[1].seconds:.3f} s"
        require_alike({"the checkpoint to go on from": chosen}, advice="give all machines one output_dir")
        step, opened = 0, list[tuple[str, str]]()
        if read is not None:
            folder, state, rank_state = read
            self._restore(state, rank_state)
            self.policy_weights.resume(checkpoint.load_masters(folder, rank))
            agents = rank_state.open_agents or [""] * len(rank_state.open_task_ids)
            step, opened = state.step, list(zip(rank_state.open_task_ids, agents, strict=True))
        # all ranks have chosen before one of them removes anything
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoint.remove_partial(output_dir)
            rewind_trained(output_dir, source=output_dir if folder is None else folder.parent, step=step)
        if self._skip_used_numbers(output_dir) and step == 0 and self.args.should_save:
            logger.warning("the run begins; sessions of an earlier start stay in %s", output_dir / "sessions")
        if folder is not None and self.rollouts.carry_over is not None:
            self.rollouts.runner.proxy.hold()  # until the engine has the checkpoint's weights
            self.rollouts.carry_over.reopen(opened)
        self._started = time.monotonic()
        return folder

    @property
    def seconds(self) -> float:
        """Return how long the run has been training, before and after restarts."""
        return self.seconds_before + time.monotonic() - self._started

    def skip_shuffles(self, sampler: Any) -> Any:
        """Return TRL's sampler past the shuffles of earlier epochs: each draws from one generator, which a new process
        has anew."""
        for _ in range(self._epochs_done if sampler.shuffle else 0):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def save(self, trial: Any, save_model: Callable[[], None]) -> None:
        """Write transformers' own files, then ours, then the one that makes the folder a checkpoint (a collective).

        Args:
            save_model: Writes transformers' files.
        """
        state = self.trl.state
        output_dir = Path(self.trl.output_dir(trial))
        folder = output_dir / f"checkpoint-{state.global_step}"
        if self.args.should_save:
            checkpoint.begin_checkpoint(folder)
        self.accelerator.wait_for_everyone()
        # transformers knows no other than the best evaluation of all, whose step may have no checkpoint
        best = find_best(state.log_history, output_dir, self.args)
        if best is not None and best["checkpoint"] is not None:
            state.best_model_checkpoint = str(output_dir / best["checkpoint"])
        with self.without_limit():  # the older ones are still needed
            save_model()
        rank, rounded = self.accelerator.process_index, self.policy_weights.rounded
        checkpoint.save_rank_state(folder, rank, self._get_rank_state())
        if rounded is not None and (rank == 0 or rounded.is_sharded):
            checkpoint.save_masters(folder, rank, rounded.state_dict())
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoint.finish_checkpoint(folder, self._get_run_state(), is_resumable=not self.args.save_only_model)
            limit = self.args.save_total_limit
            checkpoint.rotate_checkpoints(output_dir, limit=limit, best=state.best_model_checkpoint)

    @contextmanager
    def without_limit(self) -> Iterator[None]:
        """Keep transformers from removing checkpoints inside the block."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            yield
        finally:
            self.args.save_total_limit = limit

    def take_best(self) -> None:
        """Take what belongs to the weights of the best checkpoint, which transformers has just loaded."""
        self.trl.loaded_step = -1  # the engine has those of the last step
        best = Path(self.trl.state.best_model_checkpoint)
        masters = checkpoint.load_masters(best, self.accelerator.process_index)
        if self.policy_weights.rounded is not None and masters is not None:
            self.policy_weights.rounded.load_state_dict(masters)

    def _read(self, folder: Path) -> tuple[RunState, RankState]:
        checkpoint.know_cpu_devices()
        state, of_rank = checkpoint.load_state(folder, self.accelerator.process_index, self.accelerator.device)
        checkpoint.require_same_settings(state.settings, self._describe_settings())
        if self.args.ignore_data_skip:
            raise ConfigError("ignore_data_skip must be false to resume: tasks that were trained would come again")
        return state, of_rank

    def _restore(self, state: RunState, rank_state: RankState) -> None:
        self.trl.micro_step = state.micro_step
        self._epochs_done = state.epochs
        self.rollouts.num_batches = state.num_batches
        self.step.windows = list(rank_state.windows) or None
        self.engine.policy_version = state.policy_version
        self.seconds_before = state.seconds
        if self.rollouts.upcoming is not None:
            self.rollouts.upcoming.skip(state.micro_step)

    def _skip_used_numbers(self, output_dir: Path) -> bool:
        """Number batches after all that are on disk, so that an id names one session (a collective).

        Returns:
            Whether another process has left some.
        """
        folders = (_BATCH_FOLDER.fullmatch(path.name) for path in output_dir.glob("sessions/*/*"))
        used = [max((int(match[1]) + 1 for match in folders if match), default=0)]
        num_used: int = broadcast_object_list(used)[0]
        is_first = self.rollouts.num_batches == 0
        self.rollouts.num_batches = max(self.rollouts.num_batches, num_used)
        return is_first and num_used > 0

    def _describe_settings(self) -> dict[str, Any]:
        order = describe_order(self.args, self.rollouts.tasks["train"], self.rollouts.runner.harness)
        return order | {"sequence_layout": self.layout_kind}

    def _get_rank_state(self) -> RankState:
        is_used_up = self.trl.micro_step % (self.args.steps_per_generation * self.args.num_iterations) == 0
        opened = () if self.rollouts.carry_over is None else self.rollouts.carry_over.list_open()
        return RankState(
            windows=() if is_used_up else self.step.windows or (),
            open_task_ids=[task_id for task_id, _ in opened],
            open_agents=[agent for _, agent in opened],
        )

    def _get_run_state(self) -> RunState:
        state = self.trl.state
        return RunState(
            step=state.global_step,
            micro_step=self.trl.micro_step,
            epochs=int(state.epoch),
            num_batches=self.rollouts.num_batches,
            policy_version=self.engine.policy_version,
            seconds=self.seconds,
            settings=self._describe_settings(),
        )


def require_same_order(output_dir: Path, args: Any, task_ids: Iterable[str], harness: Harness | None = None) -> None:
    """Raise `ConfigError` where the checkpoint of `args` was written with another order of tasks; loads nothing."""
    folder = checkpoint.choose_checkpoint(output_dir, args.resume_from_checkpoint)
    if folder is not None:
        checkpoint.require_same_settings(checkpoint.read_settings(folder), describe_order(args, task_ids, harness))


def describe_order(args: Any, task_ids: Iterable[str], harness: Harness | None = None) -> dict[str, Any]:
    """Describe what the order of tasks, and of agents where there are several, hangs on."""
    settings = {name: getattr(args, name) for name in _SETTINGS}
    order = {"num_processes": args.world_size, **settings, "tasks": digest_texts(task_ids)}
    if isinstance(harness, MixedHarness):
        return order | {"agents": harness.weights, "mix_agents_in_groups": harness.within_groups}
    return order | {"agents": None}


def digest_texts(texts: Iterable[str]) -> str:
    """Return 16 digits that tell these texts, in this order, from others."""
    return hashlib.sha256("\n".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
