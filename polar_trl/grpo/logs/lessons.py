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

from polar_trl.grade.base import PASSING_REWARD
from polar_trl.grpo.logs.reasons_file import REASONS_FILE
from polar_trl.rollout.reasons import (
    ASKED,
    BEFORE_FIRST_CALL,
    MAX_COMPLETION,
    NOT_FOUND,
    OUT_OF_BUDGET,
    SESSION_TOKENS,
    WINDOW,
    Reason,
    Repeats,
    count_reasons,
    name_cut,
)
from polar_trl.run_folder import append_lines

logger = logging.getLogger(__name__)

_MEND_AGENT = "mend the agent's command by what it printed; polar-trl doctor tries it alone"
_LOOK = "look at one of these sessions"
_LONGER = {
    MAX_COMPLETION: "set max_completion_length higher",
    WINDOW: "set vllm_max_model_length higher, or make the agent's prompts shorter",
    SESSION_TOKENS: "set max_session_tokens higher",
    ASKED: "have the agent ask for longer answers (its max_tokens)",
}
"""By the limit that cut answers."""
_ADVICE = {
    NOT_FOUND: "let the agent's command be found in the sandbox (agent_command, agent_folders, sandbox_image)",
    **{name_cut(limit): advice for limit, advice in _LONGER.items()},
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
    cuts: Sequence[str | None] = ()
    """Of each rollout, the limit at which an answer was cut (`find_cut`)."""
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
    scored = [reward for reward in batch.rewards if not math.isnan(reward)]
    if not scored:
        common, why = _find_common(batch, at_least=1), "no session got a reward"
        if common is not None:
            return NoLesson(why=f"{why}; {common.why}", advice=common.advice)
        why = f"{why}: the reward functions gave none"
        return NoLesson(why=why, advice="have the grader or the reward functions give a number")
    if batch.has_advantage:
        reason = max(batch.dropped, key=lambda name: batch.dropped[name], default="").rpartition("/")[2]
        advice = "set max_trajectory_tokens higher" if reason == "too_long" else "see polar/dropped/* in the log"
        return NoLesson(why=f"all tokens of sessions with an advantage were dropped ({reason})", advice=advice)
    low, high = min(scored), max(scored)
    why = f"all {len(scored)} rewards are {low:g}"
    advice = "easier tasks, a model that solves some of them, or a grader with partial credit"
    if low < high:
        why = f"the {batch.group_size} rewards of each group are equal, from {low:g} to {high:g} between groups"
        advice = "more sessions of each task (num_generations), or tasks of middling difficulty"
    elif low > 0:
        advice = "harder tasks: the model gets the same reward on all of these"
    common = None if low >= PASSING_REWARD else _find_common(batch, at_least=len(batch.rewards) / 2)
    if common is not None:
        why, advice = f"{why}; {common.why}", common.advice
    return NoLesson(why=why, advice=advice)


def _find_common(batch: Batch, *, at_least: float) -> NoLesson | None:
    """Find what so many sessions have in common that tells why they earned nothing: how they ended, or answers cut."""
    num, parts, advice = len(batch.rewards), [], None
    for reason, count in count_reasons(reason for reason, _ in batch.reasons)[:1]:
        if count >= at_least:
            parts.append(f"{count} of {num} sessions: {reason}")
            advice = _ADVICE.get(reason.name)
            if reason.name.endswith(BEFORE_FIRST_CALL):
                advice = _ADVICE.get(reason.name.removesuffix(BEFORE_FIRST_CALL), _MEND_AGENT)
    cuts = Counter(cut for cut in batch.cuts if cut is not None)
    if advice is None and cuts.total() * 2 >= num:
        limit = cuts.most_common(1)[0][0]
        parts.append(f"answers of {cuts.total()} of {num} sessions were cut at {limit}")
        advice = _LONGER[limit]
    return NoLesson(why="; ".join(parts), advice=advice or _LOOK) if parts else None


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
                    "%s: %d of %d sessions: %s; see %s",
                    *(what, count, num, reason, self._folder / records[reason.name]),
                )
        if batch.mode == "train":
            self._nothing[batch.step] = nothing if self._nothing.get(batch.step, nothing) else None
        if nothing is not None and self._repeats.note("nothing"):
            so_far = f" ({len(self._list_nothing())} of {len(self._nothing)} steps so far)"
            logger.warning(
                "%s taught nothing%s: %s. Try: %s. Look at sessions: polar-trl inspect %s",
                *(what, so_far if len(self._nothing) > 1 else "", nothing.why, nothing.advice, self._folder),
            )
        return nothing

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say how many steps taught nothing."""
        if found := self._list_nothing():
            latest = {nothing.advice: nothing for nothing in found}
            advice, count = Counter(nothing.advice for nothing in found).most_common(1)[0]
            logger.warning(
                "%d of %d steps taught nothing; %d of them: %s. Try: %s. Look at sessions: polar-trl inspect %s",
                *(len(found), len(self._nothing), count, latest[advice].why, advice, self._folder),
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
