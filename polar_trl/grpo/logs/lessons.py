"""Say why sessions of a step failed, and why a step taught nothing and what to try; keep both in `reasons.jsonl`.

A step teaches nothing where no rollout has an advantage: all rewards of each group are equal, or there are none. Both
are said at their first time and, as they go on, at the 2nd, 4th, 8th and so on.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from polar_trl.grpo.logs.reasons_file import REASONS_FILE
from polar_trl.rollout.reasons import CUT, NOT_FOUND, OUT_OF_BUDGET, Reason, Repeats, count_reasons
from polar_trl.run_folder import append_lines

logger = logging.getLogger(__name__)

_ADVICE = {
    NOT_FOUND: "let the agent's command be found in the sandbox (agent_command, agent_folders, sandbox_image)",
    CUT: "set max_completion_length higher",
    OUT_OF_BUDGET: "set max_session_calls or max_session_tokens higher",
    "the agent ran into its time limit": "give tasks a longer agent_timeout_s, or fewer agents at a time (max_agents)",
    "the grader failed": "mend the grader by the message above",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What became of a generation batch, on all ranks."""

    step: int
    mode: str
    rewards: Sequence[float]
    """Of each rollout, groups adjacent; NaN where there is none."""
    has_advantage: bool
    """Whether any rollout has an advantage other than 0."""
    group_size: int
    reasons: Sequence[tuple[Reason | None, str]] = ()
    """Of each rollout, with the path of its record."""
    num_rows: int = 0
    dropped: Mapping[str, float] = field(default_factory=dict)
    """Sampled tokens that are not trained, by reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoLesson:
    """Why a step taught nothing, and the one thing to try."""

    why: str
    advice: str


def find_no_lesson(batch: Batch) -> NoLesson | None:
    """Find why a batch teaches nothing; None where it teaches something."""
    if batch.has_advantage and batch.num_rows:
        return None
    found = count_reasons(reason for reason, _ in batch.reasons)
    num, scored = len(batch.rewards), [reward for reward in batch.rewards if not math.isnan(reward)]
    most = f"{found[0][1]} of {num} sessions ended with {found[0][0]}" if found else ""
    look = _ADVICE.get(found[0][0].name if found else "", "look at one of these sessions: polar-trl inspect")
    if not scored:
        why = "no session got a reward" + (f"; {most}" if most else ": the reward functions gave none")
        return NoLesson(why=why, advice=look if most else "have the grader or the reward functions give a number")
    if batch.has_advantage:
        reason = max(batch.dropped, key=lambda name: batch.dropped[name], default="").rpartition("/")[2]
        advice = "set max_trajectory_tokens higher" if reason == "too_long" else "see polar/dropped/* in the log"
        return NoLesson(why=f"all tokens of sessions with an advantage were dropped ({reason})", advice=advice)
    low, high = min(scored), max(scored)
    if low < high:
        why = f"the {batch.group_size} rewards of each group are equal, from {low:g} to {high:g} between groups"
        return NoLesson(
            why=why, advice="more sessions of each task (num_generations), or tasks of middling difficulty"
        )
    why = f"all {len(scored)} rewards are {low:g}"
    if found and found[0][1] * 2 >= num:
        return NoLesson(why=f"{why}; {most}", advice=look)
    if low > 0:
        return NoLesson(why=why, advice="harder tasks: the model gets the same reward on all of these")
    return NoLesson(why=why, advice="easier tasks, a model that solves some of them, or a grader with partial credit")


class Lessons(TrainerCallback):
    """Writes a line for each batch, and warns; on rank 0.

    Args:
        folder: The run's.
        attempt: Name of this process's part of the run.
    """

    def __init__(self, folder: Path, attempt: str) -> None:
        self._folder = folder
        self._attempt = attempt
        self._repeats = Repeats()
        self._nothing: dict[int, NoLesson | None] = {}
        """By step; several batches may feed one, and one that teaches something is enough."""

    def note(self, batch: Batch) -> NoLesson | None:
        """Take a batch into account; return why it teaches nothing, if that is so."""
        found = count_reasons(reason for reason, _ in batch.reasons)
        records = {reason.name: record for reason, record in batch.reasons if reason is not None}
        num, nothing = len(batch.rewards), find_no_lesson(batch) if batch.mode == "train" else None
        self._write(batch, found, records, nothing)
        what = f"step {batch.step}" if batch.mode == "train" else f"evaluation at step {batch.step}"
        for reason, count in found[:1]:
            if count * 2 >= num and self._repeats.note((batch.mode, reason.name)):
                logger.warning(
                    "%s: %d of %d sessions ended with %s; see %s",
                    *(what, count, num, reason, self._folder / records[reason.name]),
                )
        if batch.mode == "train":
            self._nothing[batch.step] = nothing if self._nothing.get(batch.step, nothing) else None
        if nothing is not None and self._repeats.note("nothing"):
            so_far = f" ({len(self._list_nothing())} of {len(self._nothing)} steps so far)"
            logger.warning(
                "%s taught nothing%s: %s. Try: %s",
                *(what, so_far if len(self._nothing) > 1 else "", nothing.why, nothing.advice),
            )
        return nothing

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say how many steps taught nothing."""
        if found := self._list_nothing():
            latest = {nothing.advice: nothing for nothing in found}
            advice, count = Counter(nothing.advice for nothing in found).most_common(1)[0]
            logger.warning(
                "%d of %d steps taught nothing; %d of them: %s. Try: %s",
                *(len(found), len(self._nothing), count, latest[advice].why, advice),
            )

    def _list_nothing(self) -> list[NoLesson]:
        return [nothing for nothing in self._nothing.values() if nothing is not None]

    def _write(
        self,
        batch: Batch,
        found: Sequence[tuple[Reason, int]],
        records: Mapping[str, str],
        nothing: NoLesson | None,
    ) -> None:
        line: dict[str, Any] = {"step": batch.step, "mode": batch.mode, "attempt": self._attempt}
        line["sessions"] = len(batch.rewards)
        line["reasons"] = [
            {"reason": reason.name, "sessions": count, "example": reason.detail, "record": records[reason.name]}
            for reason, count in found
        ]
        if nothing is not None:
            line |= {"taught_nothing": nothing.why, "try": nothing.advice}
        self._folder.mkdir(parents=True, exist_ok=True)
        append_lines(self._folder / REASONS_FILE, json.dumps(line).encode() + b"\n")
