"""Log what became of the rollouts of a generation or evaluation batch: metrics, tables, and the run's files."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from polar_trl.grpo.credit.advantage import Advantages, RolloutAdvantage
from polar_trl.grpo.logs.completions_table import CompletionsTable
from polar_trl.grpo.logs.evaluations import Evaluations
from polar_trl.grpo.logs.lessons import Batch, Lessons
from polar_trl.grpo.logs.metrics import (
    append_metrics,
    build_agent_metrics,
    build_rollout_metrics,
    count_rollout,
    nan_std,
)
from polar_trl.grpo.logs.trained_rows import TrainedRows, describe_rollout
from polar_trl.grpo.rewards import Rewards
from polar_trl.grpo.rows import Row
from polar_trl.grpo.trl_bridge import TrlBridge
from polar_trl.rollout.reasons import find_cut, find_reason
from polar_trl.rollout.session_run import RolloutResult


@dataclass(eq=False)
class RolloutLog:
    """Writes the figures of batches.

    Args:
        rewards: Names of the reward functions, and how often one gave a number that is not finite.
        trained_rows: The run's files of rollouts and rows.
        table: The table of completions, if there is one.
    """

    trl: TrlBridge
    rank: int
    rewards: Rewards
    trained_rows: TrainedRows
    table: CompletionsTable | None
    agents: Sequence[str] = field(default=(), init=False)
    """Names of the agents of a run that has several; they are logged one by one as well."""
    evaluations: Evaluations = field(default_factory=Evaluations)
    lessons: Lessons = field(init=False)
    """Says why sessions failed and steps taught nothing."""
    _described: list[dict[str, Any]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.lessons = Lessons(self.trained_rows.run, self.trained_rows.attempt)

    def name_record(self, path: Path | None) -> str:
        """Return a record's path relative to the run's folder; "" where there is none."""
        return self.trained_rows.name_record(path)

    def log_rewards(self, rewards_RF: Tensor, advantages: Advantages, mode: str) -> None:
        """Log TRL's reward metrics, and what reward functions logged through TRL's `log_metric` (a collective)."""
        metrics = self.trl.metrics(mode)  # lists: functions may share a name, or log under one of these
        for name, column in zip(self.rewards.names, rewards_RF.T, strict=True):
            metrics[f"rewards/{name}/mean"].append(torch.nanmean(column).item())
            metrics[f"rewards/{name}/std"].append(nan_std(column))
        metrics["reward"].append(torch.nanmean(advantages.rewards_R).item())
        metrics["reward_std"].append(nan_std(advantages.rewards_R))
        metrics["frac_reward_zero_std"].append(advantages.zero_variance_R.float().mean().item())
        logged = self.trl.take_logged_metrics()
        for name in sorted(set(gather_object(list(logged)))):
            values = gather_object(logged.get(name, []))
            metrics[name].append(sum(values) / len(values))

    def log_resampled(self, num_groups: int) -> None:
        """Log how many groups of all ranks were rolled out in the place of others."""
        self.trl.log("train", {"polar/resampled_groups": num_groups})

    def describe(self, result: RolloutResult, outcome: RolloutAdvantage, dropped: str | None) -> None:
        """Note a rollout for the run's files, and the reason if it is not trained."""
        record = self.name_record(result.record_path)
        self._described.append(
            describe_rollout(result.rollout, record, outcome.reward, outcome.advantage, dropped=dropped)
        )

    def log_batch(
        self,
        results: Sequence[RolloutResult],
        rewards_RF: Tensor,
        advantages: Advantages,
        rows: Sequence[Row],
        dropped: Counter[str],
        mode: str,
    ) -> None:
        """Log counts and times over all ranks, and write down the rollouts that were described (a collective)."""
        step = self.trl.global_step + (mode == "train")
        described, self._described = self._described, []
        self.trained_rows.write_rollouts(mode, step, described)
        outcomes = advantages.list_rollouts(self.rank, len(results))
        counted = [
            (
                result.rollout.agent,
                outcome.reward,
                count_rollout(result) | {"no_reward": line["dropped"] == "no_reward"},
            )
            for result, outcome, line in zip(results, outcomes, described, strict=True)
        ]
        everyones: list[tuple[str | None, float, dict[str, float]]] = gather_object(counted)
        summaries = [summary for _, _, summary in everyones]
        lengths: list[int] = gather_object([len(row.token_ids_T) for row in rows])
        figures = build_rollout_metrics(summaries)
        for reason, count in sorted(sum(gather_object([dropped]), Counter()).items()):
            figures[f"polar/dropped/{reason}"] = figures.get(f"polar/dropped/{reason}", 0) + count
        append_metrics(self.trl.metrics(mode), figures)
        num_not_finite = self.rewards.num_not_finite + int(advantages.overflowed_R.sum())
        num_not_finite += int(sum(summary.get("counters/rewards_not_finite", 0) for summary in summaries))
        self.rewards.num_not_finite = 0
        self.trl.log(
            mode,
            {
                "polar/rollouts_without_reward": sum(summary["no_reward"] for summary in summaries),
                "polar/rewards_not_finite": num_not_finite,
            },
        )
        if self.agents and mode == "train":  # an evaluation is of one
            self.trl.log(mode, build_agent_metrics(self.agents, everyones))
        if mode == "train":
            self.trl.state.num_input_tokens_seen += sum(lengths)
        else:
            # where there is a grader, whether a task is solved is its to say
            rewards = [
                (result.rollout.task_id, outcome.reward if result.rollout.reward is None else result.rollout.reward)
                for result, outcome in zip(results, outcomes, strict=True)
                if outcome.scored
            ]
            self.evaluations.note(gather_object(rewards))
        self.trl.metrics(mode)["num_tokens"] = [self.trl.state.num_input_tokens_seen]
        self._note_lesson(results, advantages, len(lengths), figures, mode, step)
        if self.table is not None:
            self._fill_table(self.table, results, rewards_RF, advantages, mode, step)

    def _note_lesson(
        self,
        results: Sequence[RolloutResult],
        advantages: Advantages,
        num_rows: int,
        figures: Mapping[str, float],
        mode: str,
        step: int,
    ) -> None:
        """Say why sessions failed, and whether the batch teaches anything (a collective)."""
        reasons = gather_object(
            [(find_reason(result.rollout), self.name_record(result.record_path)) for result in results]
        )
        cuts = gather_object([find_cut(result.rollout) for result in results])
        if self.rank != 0:
            return
        rewards_R = advantages.rewards_R.masked_fill(~advantages.scored_R, math.nan)
        nothing = self.lessons.note(
            Batch(
                step=step,
                mode=mode,
                rewards=rewards_R.tolist(),
                has_advantage=not bool(advantages.zero_variance_R.all()),
                group_size=max(Counter(result.rollout.group_id for result in results).values()),
                reasons=reasons,
                cuts=cuts,
                num_rows=num_rows,
                dropped={name: count for name, count in figures.items() if name.startswith("polar/dropped/")},
            )
        )
        if mode == "train":
            self.trl.log(mode, {"polar/taught_nothing": float(nothing is not None)})

    def _fill_table(
        self,
        table: CompletionsTable,
        results: Sequence[RolloutResult],
        rewards_RF: Tensor,
        advantages: Advantages,
        mode: str,
        step: int,
    ) -> None:
        outcomes = advantages.list_rollouts(self.rank, len(results))
        local = slice(self.rank * len(results), (self.rank + 1) * len(results))
        table.add(
            mode,
            step,
            results,
            {
                f"rewards/{name}": column[local].tolist()
                for name, column in zip(self.rewards.names, rewards_RF.T, strict=True)
            },
            [outcome.reward for outcome in outcomes],
            [outcome.advantage for outcome in outcomes],
        )
