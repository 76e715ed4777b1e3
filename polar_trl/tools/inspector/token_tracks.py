"""Build the token tracks of a session: each trajectory, and each call that is in none, as arrays per token.

A token is "trained" only where the trainer's rows have it; without rows it is "trainable".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar_trl.recording.log import SessionRecord
from polar_trl.tools.inspector.sessions import reconstruct
from polar_trl.tools.inspector.trained_rows import RolloutOutcome, TrainedRow
from polar_trl.types import Call, Trajectory

STATES = (
    "context", "trained", "trainable", "auxiliary", "superseded", "no_reward", "zero_variance", "too_long", "stale",
    "too_long_or_stale", "evaluation", "cut", "not_chosen",
)  # fmt: skip
"""Token states; the index is the code. "context": not sampled here. "trainable": whether it was trained is not on
record. The others were sampled and not trained, for that reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTrack:
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
        """Count the sampled tokens of each state."""
        counts = np.bincount(self.states_T, minlength=len(STATES))
        return {name: int(count) for name, count in zip(STATES, counts, strict=True) if count and name != "context"}


def build_tracks(
    record: SessionRecord,
    outcome: RolloutOutcome | None,
    rows: Sequence[TrainedRow],
    max_tokens: int | None,
    *,
    chooses_turns: bool = False,
) -> list[TokenTrack]:
    """Build the tracks: trajectories in the order of their first calls, then each call that no trajectory trains.

    Args:
        max_tokens: The run's `max_trajectory_tokens`, which tells too long from stale where no row was made.
        chooses_turns: Whether the run trains only some calls (`train_turns`).
    """
    rollout = record.rollout
    trajectories = reconstruct(record).trajectories
    tracks = [
        _build_trained(f"trajectory {number}", trajectory, rollout.calls, outcome, rows, max_tokens, chooses_turns)
        for number, trajectory in enumerate(trajectories)
    ]
    if outcome is None and rollout.error is not None and record.finished:
        tracks = [_mark(track, "no_reward") for track in tracks]
    used = {index for track in tracks for index in track.calls}
    for call in rollout.calls:
        if call.index not in used and call.completion.token_ids:
            reason = "auxiliary" if call.purpose == "auxiliary" else "superseded"
            track = _build_track(f"{reason} call {call.index}", _build_single(rollout.id, call), rollout.calls)
            tracks.append(_mark(track, reason))
    return tracks


def _build_single(rollout_id: str, call: Call) -> Trajectory:
    num_prompt, num_sampled = len(call.prompt_ids), len(call.completion.token_ids)
    return Trajectory(
        rollout_id=rollout_id,
        call_indices=(call.index,),
        token_ids=(*call.prompt_ids, *call.completion.token_ids),
        trainable=(False,) * num_prompt + (True,) * num_sampled,
        logprobs=(0.0,) * num_prompt + call.completion.logprobs,
        policy_versions=(-1,) * num_prompt + (call.completion.first_policy_version,) * num_sampled,
    )


def _build_track(name: str, trajectory: Trajectory, calls: Sequence[Call]) -> TokenTrack:
    trainable_T = np.array(trajectory.trainable, dtype=bool)
    engine_T = np.array(trajectory.logprobs, dtype=np.float32)
    engine_T[~trainable_T | ~np.isfinite(engine_T)] = np.nan
    starts = [len(calls[index].prompt_ids) for index in trajectory.call_indices]
    lengths = [len(calls[index].completion.token_ids) for index in trajectory.call_indices]
    return TokenTrack(
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
    outcome: RolloutOutcome | None,
    rows: Sequence[TrainedRow],
    max_tokens: int | None,
    chooses_turns: bool,
) -> TokenTrack:
    """Build the track of a trajectory, with the states and log-probabilities of the trainer's rows."""
    track = _build_track(name, trajectory, calls)
    if outcome is None:
        return track
    if outcome.mode != "train":
        return _mark(track, "evaluation")
    track = replace(track, advantage=outcome.advantage)
    if outcome.dropped is not None:
        return _mark(track, outcome.dropped)
    mine = [row for row in rows if set(row.calls) <= set(track.calls)]
    if not mine:
        # other trajectories of the rollout were trained and this was not: as a whole too long, or too old
        return _mark(track, _name_missing(track, max_tokens, chooses_turns)) if rows else track
    for row in mine:
        position = 0
        for start, end in row.trained:
            track.trainer_T[start:end] = row.logprobs[position : position + end - start]
            track.states_T[start:end] = STATES.index("trained")
            position += end - start
    open_T = track.states_T == STATES.index("trainable")
    positions_T = np.arange(len(open_T))
    reach = max(row.num_tokens for row in mine)
    track.states_T[open_T & (positions_T >= reach)] = STATES.index("too_long")
    track.states_T[open_T & (positions_T < reach)] = STATES.index("stale")
    chosen = {index for row in mine for index in row.calls}
    for index, (start, end) in zip(track.calls, track.spans, strict=True):
        if chooses_turns and index not in chosen and (max_tokens is None or end <= max_tokens):
            track.states_T[start:end] = STATES.index("not_chosen")
    return replace(track, advantage=mine[0].advantage, step=min(row.step for row in mine))


def _name_missing(track: TokenTrack, max_tokens: int | None, chooses_turns: bool) -> str:
    if chooses_turns and (max_tokens is None or track.spans[0][1] <= max_tokens):
        return "not_chosen"
    if max_tokens is None:
        return "too_long_or_stale"
    return "too_long" if track.spans[0][1] > max_tokens else "stale"


def _mark(track: TokenTrack, reason: str) -> TokenTrack:
    """Give all tokens sampled here one state."""
    states_T = np.where(track.states_T > 0, STATES.index(reason), 0).astype(np.uint8)
    return replace(track, states_T=states_T)


def total_states(tracks: Iterable[TokenTrack]) -> Mapping[str, Any]:
    """Count the sampled tokens of each state over all tracks."""
    total: dict[str, int] = {}
    for track in tracks:
        for name, count in track.count_states().items():
            total[name] = total.get(name, 0) + count
    return total
