"""Run the sessions of a batch: name them, start them, and return this rank's part of those that have ended."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from polar_trl.grpo.rollouts.carry_over import CarryOver
from polar_trl.grpo.rollouts.upcoming import UpcomingBatches
from polar_trl.grpo.trl_bridge import TrlBridge
from polar_trl.harness.mixed import MixedHarness
from polar_trl.rollout.runner import Job, RolloutRunner
from polar_trl.rollout.session_run import RolloutResult
from polar_trl.types import Task


class RolloutSource:
    """Rolls out the trainer's tasks.

    Args:
        args: The config.
        accelerator: Of the trainer.
        runner: Runs the sessions.
        tasks: By mode ("train", "eval") and id.
        num_generations: Rollouts of a group, by mode.
        folder: Where this process records sessions.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Any,
        trl: TrlBridge,
        *,
        runner: RolloutRunner,
        tasks: Mapping[str, dict[str, Task]],
        num_generations: Mapping[str, int],
        folder: Path,
    ) -> None:
        self._args = args
        self._accelerator = accelerator
        self.trl = trl
        self.runner = runner
        self.tasks = tasks
        self.num_generations = num_generations
        self._folder = folder
        self.num_batches = 0
        """Rolled out so far, which numbers the next one; a process that goes on from a checkpoint sets it."""
        self.carry_over: CarryOver | None = None
        self.upcoming: UpcomingBatches | None = None
        repeats = args.steps_per_generation * args.num_iterations
        if args.max_policy_lag:
            self.carry_over = CarryOver(
                runner, partial(self._gather_jobs, mode="train"), group_size=num_generations["train"]
            )
            # sessions that begin early order their own sandboxes
            self.upcoming = UpcomingBatches(None, tasks["train"], repeats=repeats)
        elif runner.backend.depth:
            self.upcoming = UpcomingBatches(runner.backend, tasks["train"], repeats=repeats)

    @property
    def rank(self) -> int:
        """Index of this process."""
        return int(self._accelerator.process_index)

    @property
    def num_ranks(self) -> int:
        """Processes that roll out."""
        return int(self._accelerator.num_processes)

    def run(self, inputs: Sequence[Mapping[str, Any]], mode: str) -> list[RolloutResult]:
        """Return as many rollouts as there are data rows, in groups; with `max_policy_lag`, of rows that were begun
        earlier or here."""
        if mode == "eval" or self.carry_over is None:
            of_eval = [str(row["agent"]) for row in inputs] if mode == "eval" else None
            jobs = self._gather_jobs([row["task_id"] for row in inputs], mode, number=self._number, agents=of_eval)
            # an evaluation that cuts agents would measure how quick the others were
            return self.runner.run(jobs, show_progress=self._shows_progress(), cut_stragglers=mode == "train")
        args = self._args
        steps_per_batch = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
        is_last = self.trl.global_step + steps_per_batch >= self.trl.state.max_steps
        next_rows = None if is_last or self.upcoming is None else self.upcoming.next_rows
        return self.carry_over.roll_out(
            [row["task_id"] for row in inputs],
            None if next_rows is None else [row["task_id"] for row in next_rows],
            number=self._number,
            show_progress=self._shows_progress(),
        )

    def run_others(self, num_groups: int, round_number: int) -> list[RolloutResult]:
        """Return this rank's part of `num_groups` groups of other training tasks, drawn at random (a collective)."""
        seed = hash((self._args.seed, self.trl.global_step, round_number)) % 2**32  # of integers: alike everywhere
        ids = list(self.tasks["train"])
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed)).tolist()
        chosen = [ids[order[index % len(ids)]] for index in range(num_groups)]
        size = self.num_generations["train"]
        task_ids = [task_id for task_id in chosen for _ in range(size)]
        jobs = self.build_jobs(task_ids, "train", seed=f"{self._number} again {round_number}")
        return self.runner.run(jobs, show_progress=self._shows_progress())

    def finish_batch(self, mode: str) -> None:
        """Order the next batch's sandboxes, now that this one was rolled out."""
        if self.upcoming is not None and mode == "train":
            self.upcoming.finish_rollouts()

    def build_jobs(
        self, task_ids: Sequence[str], mode: str, *, seed: str, agents: Sequence[str] | None = None
    ) -> list[Job]:
        """Return a job for each rollout of a batch on all ranks, with ids that no other batch of the run has.

        Args:
            seed: The same for a batch that is rolled out again after a crash, for which ids are new.
            agents: Of each rollout, "" where the run has one. None: of several, they are drawn.
        """
        size, number = self.num_generations[mode], self.num_batches
        self.num_batches += 1
        tasks, harness = [self.tasks[mode][task_id] for task_id in task_ids], self.runner.harness
        if agents is None and isinstance(harness, MixedHarness):
            agents = harness.draw(tasks, group_size=size, seed=f"{self._args.seed} {seed}")
        jobs = []
        for index, (task, agent) in enumerate(zip(tasks, agents or [""] * len(tasks), strict=True)):
            group = f"{mode}-{number:05d}-g{index // size:03d}"
            rollout_id = f"{group}-r{index % size:03d}"
            record = self._folder / f"{mode}_{number:05d}" / f"{rollout_id}.jsonl"
            jobs.append(Job(rollout_id=rollout_id, group_id=group, task=task, agent=agent or None, record_path=record))
        return jobs

    def _gather_jobs(
        self, task_ids: Sequence[str], mode: str, *, number: int, agents: Sequence[str] | None = None
    ) -> list[Job]:
        """Return the jobs of all ranks, given the tasks, and perhaps the agents, of this rank's rollouts (a
        collective)."""
        ranks = self.runner.ranks
        everyones = list(chain.from_iterable(ranks.gather(list(task_ids))))
        theirs = None if agents is None else list(chain.from_iterable(ranks.gather(list(agents))))
        return self.build_jobs(everyones, mode, seed=str(number), agents=theirs)

    @property
    def _number(self) -> int:
        """Of the current generation batch among those of the training, however often it was begun."""
        return self.trl.micro_step // (self._args.steps_per_generation * self._args.num_iterations)

    def _shows_progress(self) -> bool:
        args = self._args
        return bool(args.show_rollout_progress and self._accelerator.is_main_process and not args.disable_tqdm)
