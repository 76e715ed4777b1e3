"""One training step of GRPO on agents' sessions, top to bottom.

    push weights -> roll out and grade -> reward -> advantage -> rows -> pack -> loss, gradient -> optimizer step

transformers' loop calls `TrainingStep.run` (through `PackedGRPOTrainer.training_step`) once per micro-step. The first
micro-step of a generation batch collects its rows (`SessionRows.collect`) and packs them; the last one of an optimizer
step runs all of that step's forward and backward passes (`TrainingStep.train`). The optimizer's own step follows in
transformers' loop, and the weights that it makes reach the engine when the next batch is collected.

Four things differ from the textbook:

1. A rollout is a session of many model calls. It has one reward and one advantage (each call its own, with
   `turn_credit`), and becomes as few rows as the token prefixes of its calls allow; how many there are changes nothing
   in the loss.
2. Passes are filled by tokens, not by rows, and the loss is summed token by token over all passes and ranks of a step.
3. The sampling policy is the trained policy, at most `max_policy_lag` versions older: the engine computes with the
   same rounded weights, and the importance ratio corrects for the rest.
4. A rollout without a reward (its sandbox broke, its grader could not decide) enters no baseline and no gradient.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from polar_trl.errors import ConfigError
from polar_trl.grpo.credit.advantage import Advantages, compute_advantages
from polar_trl.grpo.credit.turn_credit import average_credits, credit_turns
from polar_trl.grpo.logs.phases import PhaseClock
from polar_trl.grpo.logs.rollout_log import RolloutLog
from polar_trl.grpo.logs.trained_log import TrainedLog
from polar_trl.grpo.loss.step_loss import StepLoss
from polar_trl.grpo.loss.token_loss import MicroBatch
from polar_trl.grpo.memory.checkpointing import Checkpointing
from polar_trl.grpo.packing.packer import Packer, Window
from polar_trl.grpo.rewards import Rewards
from polar_trl.grpo.rollouts.resampling import resample_constant_groups
from polar_trl.grpo.rollouts.source import RolloutSource
from polar_trl.grpo.rows import Row, build_rows
from polar_trl.grpo.run.machines import failing_together
from polar_trl.grpo.trl_bridge import TrlBridge
from polar_trl.grpo.turns import TurnChoice, find_cut_rule
from polar_trl.grpo.weights.engine_sync import EngineSync
from polar_trl.grpo.weights.step_guard import StepGuard
from polar_trl.rollout.session_run import RolloutResult


@dataclass(eq=False)
class SessionRows:
    """From data rows to training rows: the part of a step in which agents run.

    Args:
        args: The config.
        max_tokens: Of a row.
    """

    args: Any
    trl: TrlBridge
    engine: EngineSync
    rollouts: RolloutSource
    rewards: Rewards
    log: RolloutLog
    phases: PhaseClock
    max_tokens: int
    choose_turns: TurnChoice | None = None
    """Which calls are trained; None: all."""
    _left_out: set[str] = field(default_factory=set, init=False)
    """Rollouts of the batch that have a reward, and are in no baseline by `cut_sessions`."""

    def collect(self, inputs: Sequence[dict[str, Any]], mode: str) -> list[Row]:
        """Roll out a generation or evaluation batch and return this rank's training rows (a collective).

        Args:
            inputs: Data rows of this rank, one for each of its rollouts; rollouts of a group are adjacent.
            mode: "train" or "eval".
        """
        # ---- Push the weights of the last optimizer step, and let the engine sample
        self.engine.wake(mode)

        # ---- Roll out: agents run in sandboxes and are graded as they end
        with self.phases.measure(mode, "rollouts"):
            results = self.rollouts.run(inputs, mode)

        # ---- Reward: [R, F] of all ranks, the grader's first
        self._left_out.clear()
        rewards_RF = self._compute_rewards(results, mode)

        # ---- Advantage: one per rollout, over its group; with `turn_credit` one per call
        advantages = self._compute_advantages(rewards_RF, mode)
        self._require_reward(advantages, results)
        credits: list[dict[int, float]] = []
        if mode == "train" and self.args.turn_credit != "none":
            advantages, credits = self._credit_turns(results, advantages)
        self.log.log_rewards(rewards_RF, advantages, mode)
        if mode == "train" and self.args.resample_zero_variance:
            with self.phases.measure(mode, "resampling"):
                results, rewards_RF, advantages, num_resampled = resample_constant_groups(
                    results,
                    rewards_RF,
                    advantages,
                    source=self.rollouts,
                    num_rounds=self.args.resample_zero_variance,
                    compute_rewards=lambda others: self._compute_rewards(others, mode),
                    compute_advantages=lambda rewards_RF: self._compute_advantages(rewards_RF, mode),
                )
                self.log.log_resampled(num_resampled)

        # ---- The engine's memory is the trainer's from here on
        self.engine.sleep(mode)
        self.rollouts.finish_batch(mode)

        # ---- Rows: trajectories with their rollout's advantage, cut to what fits
        rows, dropped = self._build_rows(results, advantages, credits, mode)
        self.log.log_batch(results, rewards_RF, advantages, rows, dropped, mode)
        return rows

    def _compute_rewards(self, results: Sequence[RolloutResult], mode: str) -> Tensor:
        """Return [R, F] of all ranks, NaN also for sessions that `cut_sessions` leaves out of the baseline."""
        rewards_RF = self.rewards.compute(results, mode)
        is_out = [self._find_cut_rule(result, mode) == "leave_out" for result in results]
        is_out_R = torch.tensor(list(chain.from_iterable(self.rollouts.runner.ranks.gather(is_out))))
        is_out_R = is_out_R.to(rewards_RF.device) & ~torch.isnan(rewards_RF).all(dim=1)
        first = self.rollouts.rank * len(results)
        own = is_out_R[first : first + len(results)].tolist()
        self._left_out |= {result.rollout.id for result, is_left in zip(results, own, strict=True) if is_left}
        return rewards_RF.masked_fill(is_out_R[:, None], torch.nan)

    def _find_cut_rule(self, result: RolloutResult, mode: str) -> str:
        if mode == "eval":
            return "train"  # all are counted
        return find_cut_rule(result.rollout, self.rollouts.tasks[mode], self.args.cut_sessions)

    def _compute_advantages(self, rewards_RF: Tensor, mode: str) -> Advantages:
        return compute_advantages(
            rewards_RF,
            self.rewards.weights_F.to(rewards_RF.device),
            num_generations=self.rollouts.num_generations[mode],
            scale_rewards=self.args.scale_rewards,
            aggregation=self.args.multi_objective_aggregation,
        )

    def _require_reward(self, advantages: Advantages, results: Sequence[RolloutResult]) -> None:
        if not advantages.scored_R.any() and self.trl.global_step == 0:
            if self._left_out:
                raise ConfigError(
                    "a limit ended all sessions of the first batch, and cut_sessions leaves such ones out: raise "
                    "max_completion_length, max_session_calls or agent_timeout_s, or set cut_sessions to train or mask"
                )
            reasons = Counter(result.rollout.error for result in results if result.rollout.error).most_common(1)
            why = reasons[0][0] if reasons else "the reward functions gave none, or none that is finite"
            raise ConfigError(f"no rollout of the first batch has a reward; most often: {why}")

    def _credit_turns(
        self, results: Sequence[RolloutResult], advantages: Advantages
    ) -> tuple[Advantages, list[dict[int, float]]]:
        """Return advantages of rollouts that are the means of their calls', and this rank's of calls, by index (a
        collective)."""
        trained = [sorted(i for t in result.reconstruction.trajectories for i in t.call_indices) for result in results]
        rewards = [
            [(result.rollout.call_rewards or {}).get(index, 0.0) for index in indices]
            for result, indices in zip(results, trained, strict=True)
        ]
        rewards_R = list(chain.from_iterable(self.rollouts.runner.ranks.gather(rewards)))
        given = [reward for of_calls in rewards_R for reward in of_calls]
        self.trl.log("train", {"polar/call_reward": fmean(given or [0.0])})
        credits_R = credit_turns(
            advantages,
            rewards_R,
            kind=self.args.turn_credit,
            weight=self.args.turn_credit_weight,
            num_generations=self.rollouts.num_generations["train"],
            scale_rewards=self.args.scale_rewards,
        )
        first = self.rollouts.rank * len(results)
        own = credits_R[first : first + len(results)]
        by_call = [dict(zip(indices, values, strict=True)) for indices, values in zip(trained, own, strict=True)]
        return average_credits(advantages, credits_R, self.rollouts.num_generations["train"]), by_call

    def _build_rows(
        self,
        results: Sequence[RolloutResult],
        advantages: Advantages,
        credits: Sequence[Mapping[int, float]],
        mode: str,
    ) -> tuple[list[Row], Counter[str]]:
        """Return this rank's rows, and sampled tokens that are not trained, by reason.

        Args:
            credits: Advantages of calls by index, of each rollout; none where rollouts have one.
        """
        trained: list[tuple[RolloutResult, float | Mapping[int, float]]] = []
        dropped = Counter[str]()
        outcomes = advantages.list_rollouts(self.rollouts.rank, len(results))
        for place, (result, outcome) in enumerate(zip(results, outcomes, strict=True)):
            reason = None
            if result.rollout.id in self._left_out:
                reason = "cut"
            elif not outcome.scored:
                reason = "no_reward"  # law 4: without a reward, no gradient
            elif self._find_cut_rule(result, mode) == "mask":
                reason = "cut"
            elif outcome.zero_variance and self.args.drop_zero_variance and mode == "train":
                reason = "zero_variance"
            if reason is None:
                trained.append((result, credits[place] if credits else outcome.advantage))
            else:
                dropped[reason] += sum(sum(trajectory.trainable) for trajectory in result.reconstruction.trajectories)
            self.log.describe(result, outcome, reason)
        with failing_together() if self.choose_turns else nullcontext():  # a user's function may raise on one rank
            rows, others = build_rows(
                trained,
                max_tokens=self.max_tokens,
                oldest_version=self.rollouts.runner.oldest_version,
                name_record=self.log.name_record,
                choose_turns=self.choose_turns,
            )
        return rows, dropped + others


@dataclass(eq=False)
class TrainingStep:
    """From training rows to gradients.

    A generation batch is collected in its first micro-step, and its rollouts are dealt to windows, the largest parts
    that both a generation batch and an optimizer step divide into. The passes of an optimizer step, as many as its
    tokens need, all run in its last micro-step; with no rows there are none, and the optimizer makes no step either.

    A generation's loss is the mean over its windows; the loss of an optimizer step is the mean over its windows, so
    over generations where several feed it. Generations without rows are left out of it.

    Args:
        collect_rows: This rank's rows for data rows and a mode (a collective).
    """

    args: Any
    accelerator: Any
    trl: TrlBridge
    collect_rows: Callable[[Any, str], list[Row]]
    packer: Packer
    loss: StepLoss
    guard: StepGuard
    phases: PhaseClock
    checkpointing: Checkpointing
    windows: list[Window] | None = field(default=None, init=False)
    """Passes of each window of the last generation batch."""
    _pending: list[Window] = field(default_factory=list, init=False)
    """Windows of the optimizer step that is under way."""
    _micro_steps: int = field(default=0, init=False)
    """Micro-steps of that step so far."""
    trained_log: TrainedLog | None = field(default=None, init=False)
    """Receives the rows of every optimizer step."""

    def run(self, model: Any, inputs: Any) -> Tensor:
        """Run one micro-step of transformers' loop and return what it adds to the logged loss."""
        started = time.perf_counter()
        model.train()

        # ---- Roll out, once per generation batch, and pack its rows into passes
        repeats = self.args.steps_per_generation * self.args.num_iterations
        if self.windows is None or self.trl.micro_step % repeats == 0:
            rows = self.collect_rows(inputs, "train")
            with self.phases.measure("train", "planning"):
                self.windows = self.pack(rows, "train")

        # ---- The window that this micro-step ends, if it ends one
        per_window = self.packer.micro_steps_per_window
        if (self.trl.micro_step + 1) % per_window == 0 and any(self.windows):
            self._pending.append(self.windows[self.trl.micro_step // per_window % len(self.windows)])
        self.trl.micro_step += 1
        self._micro_steps += 1

        # ---- Train, in the last micro-step of an optimizer step
        loss = torch.zeros((), device=self.accelerator.device)
        is_last = self._micro_steps >= self.trl.micro_steps_per_step
        if is_last:
            windows, self._pending, self._micro_steps = self._pending, [], 0
            with self.phases.measure("train", "training"):
                loss = self.train(model, self.loss.prepare(windows))
        self.trl.log_step_time(time.perf_counter() - started, is_last=is_last)
        return loss

    def train(self, model: Any, passes: list[MicroBatch]) -> Tensor:
        """Run forward and backward of all passes of a step; gradients are exchanged after the last one only."""
        self.guard.has_rows = bool(passes)  # as many on every rank, and none where no rank has rows
        layers = self.checkpointing.choose(passes)
        while (loss := self._run_passes(model, passes, layers)) is None:
            # the pass that ran out of memory may have added a part of its gradients
            model.zero_grad(set_to_none=True)
            self.loss.forget()
            layers = self.checkpointing.choose(passes)
        self.trl.log("train", self.checkpointing.end_step(layers))
        self.loss.log("train")
        rows = [row for micro_batch in passes for row in micro_batch["rows"]]
        self.guard.note(loss, (row["rollout"] for row in rows))
        if self.trained_log is not None:
            self.trained_log.note_rows(rows)
        return loss

    def _run_passes(self, model: Any, passes: list[MicroBatch], layers: Sequence[int]) -> Tensor | None:
        """Return the sum of the passes' losses; None where one ran out of memory that another try can have."""
        loss = torch.zeros((), device=self.accelerator.device)
        for index, (micro_batch, checkpointed) in enumerate(zip(passes, layers, strict=True), start=1):
            exchange = nullcontext() if index == len(passes) else self.trl.no_gradient_exchange(model)
            try:
                with exchange, self.checkpointing.apply(micro_batch, checkpointed):
                    loss += self.trl.run_pass(model, micro_batch)
            except torch.OutOfMemoryError:
                prefixes = (other["packed"].layout.prefix for other in passes)
                for prefix in filter(None, prefixes):
                    prefix.kept.clear()  # with the gradients that passes before this one gave it
                return None
        return loss

    def evaluate(self, model: Any, inputs: Any) -> Tensor:
        """Return the loss of an evaluation batch."""
        windows = self.pack(self.collect_rows(inputs, "eval"), "eval")
        loss = torch.zeros((), device=self.accelerator.device)
        for micro_batch in self.loss.prepare(windows):
            loss += self.trl.compute_loss(model, micro_batch)
        self.loss.log("eval")
        return loss

    def pack(self, rows: list[Row], mode: str) -> list[Window]:
        """Return this rank's passes of each window, scored by other policies if the loss needs that (a collective)."""
        windows, figures = self.packer.plan(rows, mode, step=self.trl.global_step)
        self.trl.log(mode, figures)
        repeats = self.args.steps_per_generation * self.args.num_iterations
        is_off_policy = mode == "train" and self.args.gradient_accumulation_steps % repeats != 0
        for window in windows:
            self.loss.add_reference_logps(window, is_off_policy=is_off_policy)
        return windows

    def decide(self, optimizer: Any, grad_norm: float | None) -> None:
        """Decide whether the optimizer's step is made, right before it (a collective). Raises `StepError`."""
        self.guard.attach(optimizer)
        self.guard.decide(grad_norm, self.trl.global_step + 1)
        self.trl.log("train", {"polar/skipped_steps": float(self.guard.fault is not None)})
        if self.guard.fault is not None and self.trained_log is not None:
            self.trained_log.skip(self.guard.fault)

    def write_trained(self) -> None:
        """Write down the tokens that the optimizer's step trained, if it was made."""
        if self.loss.trained_rows is not None:
            if self.guard.fault is not None:
                self.loss.trained_rows.forget()
            self.loss.trained_rows.write_rows(self.trl.global_step)
