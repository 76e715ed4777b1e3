"""A session's record and the trainer's rows -> lanes: each trajectory, and each call that is in none, as arrays.

It refuses to say that a token was trained unless the trainer's rows say so; without rows it is "trainable".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar_trl.recording.log import SessionRecord
from polar_trl.tools.inspector.rows import Fate, TrainedRow
from polar_trl.tools.inspector.sessions import reconstruct
from polar_trl.types import Call, Trajectory

STATES = (
    "context", "trained", "trainable", "auxiliary", "superseded", "no_reward", "zero_variance", "too_long", "stale",
    "too_long_or_stale", "evaluation",
)  # fmt: skip
"""What became of a token; the index is its code. "context": not sampled here. "trainable": whether it was trained is
not on record. The others were sampled and not trained, for that reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """T tokens: one trajectory of the session, or one call that is in none."""

    name: str
    calls: tuple[int, ...]
    """Calls whose samples are its own."""
    spans: tuple[tuple[int, int], ...]
    """[start, end) of each of those."""
    ids_T: NDArray[np.int32]
    states_T: NDArray[np.uint8]
    """Codes of `STATES`."""
    engine_T: NDArray[np.float32]
    """Engine's log-probability (nats); NaN where not sampled here, and where it is infinite."""
    trainer_T: NDArray[np.float32]
    """Trainer's; NaN where unknown."""
    versions_T: NDArray[np.int32]
    """Policy version; -1 where not sampled here."""
    advantage: float | None
    step: int | None
    """Optimizer step that trained it."""

    @property
    def gaps_T(self) -> NDArray[np.float32]:
        """Trainer's log-probability minus the engine's; NaN where unknown."""
        return self.trainer_T - self.engine_T

    def count_states(self) -> dict[str, int]:
        """State -> sampled tokens."""
        counts = np.bincount(self.states_T, minlength=len(STATES))
        return {name: int(count) for name, count in zip(STATES, counts, strict=True) if count and name != "context"}


def build_lanes(
    record: SessionRecord, fate: Fate | None, rows: Sequence[TrainedRow], max_tokens: int | None
) -> list[Lane]:
    """Trajectories first, in the order of their first calls; then each call that no trajectory trains.

    Args:
        max_tokens: The run's `max_trajectory_tokens`, which tells too long from stale where no row was made.
    """
    rollout = record.rollout
    trajectories = reconstruct(record).trajectories
    lanes = [
        _build_trained(f"trajectory {number}", trajectory, rollout.calls, fate, rows, max_tokens)
        for number, trajectory in enumerate(trajectories)
    ]
    if fate is None and rollout.error is not None and record.finished:
        lanes = [_mark(lane, "no_reward") for lane in lanes]
    used = {index for lane in lanes for index in lane.calls}
    for call in rollout.calls:
        if call.index not in used and call.completion.token_ids:
            reason = "auxiliary" if call.purpose == "auxiliary" else "superseded"
            lane = _build_lane(f"{reason} call {call.index}", _build_single(rollout.id, call), rollout.calls)
            lanes.append(_mark(lane, reason))
    return lanes


def _build_single(rollout_id: str, call: Call) -> Trajectory:
    num_prompt, num_sampled = len(call.prompt_ids), len(call.completion.token_ids)
    return Trajectory(
        rollout_id=rollout_id,
        call_indices=(call.index,),
        token_ids=call.prompt_ids + call.completion.token_ids,
        trainable=(False,) * num_prompt + (True,) * num_sampled,
        logprobs=(0.0,) * num_prompt + call.completion.logprobs,
        policy_versions=(-1,) * num_prompt + (call.completion.first_policy_version,) * num_sampled,
    )


def _build_lane(name: str, trajectory: Trajectory, calls: Sequence[Call]) -> Lane:
    trainable_T = np.array(trajectory.trainable, dtype=bool)
    engine_T = np.array(trajectory.logprobs, dtype=np.float32)
    engine_T[~trainable_T | ~np.isfinite(engine_T)] = np.nan
    starts = [len(calls[index].prompt_ids) for index in trajectory.call_indices]
    lengths = [len(calls[index].completion.token_ids) for index in trajectory.call_indices]
    return Lane(
        name=name,
        calls=trajectory.call_indices,
        spans=tuple((start, start + length) for start, length in zip(starts, lengths, strict=True)),
        ids_T=np.array(trajectory.token_ids, dtype=np.int32),
        states_T=trainable_T.astype(np.uint8) * STATES.index("trainable"),
        engine_T=engine_T,
        trainer_T=np.full(len(engine_T), np.nan, dtype=np.float32),
        versions_T=np.array(trajectory.policy_versions, dtype=np.int32),
        advantage=None,
        step=None,
    )


def _build_trained(
    name: str,
    trajectory: Trajectory,
    calls: Sequence[Call],
    fate: Fate | None,
    rows: Sequence[TrainedRow],
    max_tokens: int | None,
) -> Lane:
    """A trajectory with what the trainer made of it."""
    lane = _build_lane(name, trajectory, calls)
    if fate is None:
        return lane
    if fate.mode != "train":
        return _mark(lane, "evaluation")
    lane = replace(lane, advantage=fate.advantage)
    if fate.dropped is not None:
        return _mark(lane, fate.dropped)
    mine = [row for row in rows if set(row.calls) <= set(lane.calls)]
    if not mine:
        # other trajectories of the rollout were trained and this was not: as a whole too long, or too old
        return _mark(lane, _name_missing(lane, max_tokens)) if rows else lane
    for row in mine:
        position = 0
        for start, end in row.trained:
            lane.trainer_T[start:end] = row.logprobs[position : position + end - start]
            lane.states_T[start:end] = STATES.index("trained")
            position += end - start
    open_T = lane.states_T == STATES.index("trainable")
    positions_T = np.arange(len(open_T))
    reach = max(row.num_tokens for row in mine)
    lane.states_T[open_T & (positions_T >= reach)] = STATES.index("too_long")
    lane.states_T[open_T & (positions_T < reach)] = STATES.index("stale")
    return replace(lane, advantage=mine[0].advantage, step=min(row.step for row in mine))


def _name_missing(lane: Lane, max_tokens: int | None) -> str:
    if max_tokens is None:
        return "too_long_or_stale"
    return "too_long" if lane.spans[0][1] > max_tokens else "stale"


def _mark(lane: Lane, reason: str) -> Lane:
    """All that was sampled here was left out."""
    states_T = np.where(lane.states_T > 0, STATES.index(reason), 0).astype(np.uint8)
    return replace(lane, states_T=states_T)


def total_states(lanes: Iterable[Lane]) -> Mapping[str, Any]:
    """State -> sampled tokens of all lanes."""
    total: dict[str, int] = {}
    for lane in lanes:
        for name, count in lane.count_states().items():
            total[name] = total.get(name, 0) + count
    return total
