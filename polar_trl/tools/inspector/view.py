"""Open one session: its record and trained rows as the JSON that its page asks for.

Token texts and lines are made when a track is looked at.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from polar_trl.recording.log import SessionRecord
from polar_trl.rollout.ending import name_exit
from polar_trl.tools.inspector.conversation import build_calls, clean, read_text
from polar_trl.tools.inspector.forks import Fork, build_excerpts, find_fork
from polar_trl.tools.inspector.layout import Lines, build_lines
from polar_trl.tools.inspector.token_tracks import STATES, build_tracks, total_states
from polar_trl.tools.inspector.trained_rows import RolloutOutcome, TrainedRow
from polar_trl.tools.inspector.vocabulary import Pieces, Vocabulary

MAX_LINES = 400
"""Of one answer."""
MIN_COLUMNS, MAX_COLUMNS = 20, 400


class SessionView:
    """An opened session. Threads may share it.

    Args:
        record: What its file holds.
        outcome: The trainer's decision on it, if that is known.
        rows: Its trained rows.
        max_tokens: The run's `max_trajectory_tokens`, where it says.
        chooses_turns: Whether the run trains only some calls.
    """

    def __init__(
        self,
        record: SessionRecord,
        outcome: RolloutOutcome | None,
        rows: Sequence[TrainedRow],
        vocabulary: Vocabulary,
        max_tokens: int | None = None,
        *,
        chooses_turns: bool = False,
    ) -> None:
        rollout = record.rollout
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._pieces: dict[int, Pieces] = {}
        self._lines: dict[tuple[int, int], Lines] = {}
        self.tracks = build_tracks(record, outcome, rows, max_tokens, chooses_turns=chooses_turns)
        self.forks: dict[int, Fork] = {}
        num_trajectories = sum(track.name.startswith("trajectory") for track in self.tracks)
        for number, track in enumerate(self.tracks):
            fork = find_fork(track, self.tracks[: min(number, num_trajectories)], rollout.calls) if number else None
            if fork is not None:
                self.forks[number] = fork
        self._references = {fork.call: fork.other_call for fork in self.forks.values()}
        self._track_of_call = {index: number for number, track in enumerate(self.tracks) for index in track.calls}
        self._calls = rollout.calls
        self._rollout = rollout
        self.counters = {**rollout.counters}
        self.outcome = outcome

    def build_meta(self) -> dict[str, Any]:
        """Build the JSON that the page shows first: calls and tracks without their contents."""
        return {
            "calls": [self._build_call_meta(index) for index in range(len(self._calls))],
            "tracks": [self._build_track_meta(number) for number in range(len(self.tracks))],
            "tokens": total_states(self.tracks),
            "counters": self.counters,
            "dropped": None if self.outcome is None else self.outcome.dropped,
            "has_rows": self.outcome is not None,
            "vocabulary": {"known": self._vocabulary.is_known, "note": self._vocabulary.note},
            "states": STATES,
        }

    def build_ending(self) -> dict[str, Any]:
        """Build the JSON of how the agent ended, what its grader said and what it changed; None where not recorded."""
        exits, report, changes = self._rollout.agent_exit, self._rollout.grading, self._rollout.changes
        return {
            "agent": None if exits is None else {"ended": name_exit(exits), "output": clean(exits.output_tail)},
            "grading": None
            if report is None
            else {
                "output": clean(report.output_tail),
                "failed": [clean(name) for name in report.failed_tests],
                "missing": [clean(name) for name in report.missing_tests],
                "num_tests": report.num_tests,
                "num_passed": report.num_passed,
                "num_failed": report.num_failed,
                "num_missing": report.num_missing,
            },
            "changes": None if changes is None else clean(changes),
        }

    def build_calls(self, first: int, count: int) -> list[dict[str, Any]]:
        """Build the JSON of the contents of some calls."""
        return build_calls(self._calls, first, count, self._references)

    def read_text(self, call: int, part: str, offset: int) -> dict[str, Any]:
        """Read a block of one text. Raises `KeyError` or `IndexError` where there is none."""
        return read_text(self._calls[call], part, offset)

    def build_fork(self, track: int) -> dict[str, Any]:
        """Build the JSON of both texts around the first difference. Raises `KeyError` for a track without a fork."""
        fork = self.forks[track]
        return build_excerpts(fork, self.tracks[track], self.tracks[fork.other_track], self._vocabulary)

    def build_lines(self, track: int, columns: int, first: int, count: int) -> dict[str, Any]:
        """Build the JSON of some lines of a track: `starts` of the lines, then per token its columns.

        Raises `IndexError` for a track that is not there.
        """
        pieces, lines = self._lay_out(track, columns)
        count = max(0, min(count, MAX_LINES))
        start, end = lines.tokens_of(first, count)
        here = self.tracks[track]
        return {
            "num_lines": len(lines.starts_L),
            "first": first,
            "starts": lines.starts_L[first : first + count].tolist(),
            "end": end,
            "ids": here.ids_T[start:end].tolist(),
            "texts": pieces.texts_T[start:end],
            "kinds": pieces.kinds_T[start:end],
            "states": here.states_T[start:end].tolist(),
            "engine": _render_floats(here.engine_T[start:end]),
            "trainer": _render_floats(here.trainer_T[start:end]),
            "versions": here.versions_T[start:end].tolist(),
        }

    def build_overview(self, track: int, columns: int, num_bins: int) -> dict[str, Any]:
        """Build the JSON of a whole track in a few bins of lines: each bin's most frequent state, and its extremes."""
        _, lines = self._lay_out(track, columns)
        here = self.tracks[track]
        num_lines = len(lines.starts_L)
        num_bins = max(1, min(num_bins, num_lines, 2000))
        edges = lines.starts_L[np.linspace(0, num_lines, num_bins, endpoint=False).astype(int)] if num_lines else []
        gaps_T = np.nan_to_num(here.gaps_T, nan=0.0)
        largest, engine, states, versions = [], [], [], []
        for start, end in zip(edges, [*edges[1:], len(here.ids_T)], strict=True) if num_lines else ():
            gaps, sampled = gaps_T[start:end], here.states_T[start:end]
            largest.append(float(gaps[np.argmax(np.abs(gaps))]))
            own = here.engine_T[start:end]
            engine.append(float(np.nanmin(own)) if not np.isnan(own).all() else None)
            states.append(int(np.bincount(sampled[sampled > 0]).argmax()) if (sampled > 0).any() else 0)
            versions.append(int(here.versions_T[start:end].max()))
        return {
            "num_lines": num_lines,
            "gap": [round(value, 6) for value in largest],
            "engine": [None if value is None else round(value, 4) for value in engine],
            "states": states,
            "versions": versions,
        }

    def find_line(self, track: int, columns: int, position: int) -> int:
        """Find the line that a token of a track is on."""
        return self._lay_out(track, columns)[1].find_line(position)

    def describe_token(self, track: int, position: int) -> str:
        """Describe the bytes of a token. Raises `IndexError`."""
        return self._vocabulary.describe(int(self.tracks[track].ids_T[position]))

    def _lay_out(self, number: int, columns: int) -> tuple[Pieces, Lines]:
        columns = max(MIN_COLUMNS, min(columns, MAX_COLUMNS))
        track = self.tracks[number]
        with self._lock:
            if number not in self._pieces:
                self._pieces[number] = self._vocabulary.spell(track.ids_T.tolist())
            pieces = self._pieces[number]
            if (number, columns) not in self._lines:
                if len(self._lines) > 3 * len(self.tracks):  # a window that is being resized
                    self._lines.clear()
                edges = [edge for span in track.spans for edge in span]
                self._lines[number, columns] = build_lines(pieces, edges, columns)
            return pieces, self._lines[number, columns]

    def _build_call_meta(self, index: int) -> dict[str, Any]:
        call = self._calls[index]
        completion = call.completion
        return {
            "index": index,
            "track": self._track_of_call.get(index),
            "dialect": call.dialect,
            "purpose": call.purpose,
            "prompt_tokens": len(call.prompt_ids),
            "sampled_tokens": len(completion.token_ids),
            "seconds": round(call.duration_s, 3),
            "started_s": call.started_s,
            "finish_reason": completion.finish_reason,
            "versions": [completion.first_policy_version, completion.last_policy_version],
            "text_only": call.text_only,
            "stop_text": None if call.stop_text is None else clean(call.stop_text),
        }

    def _build_track_meta(self, number: int) -> dict[str, Any]:
        track, fork = self.tracks[number], self.forks.get(number)
        gaps_T = np.abs(track.gaps_T)
        has_gaps = bool((~np.isnan(gaps_T)).any())
        sampled = track.states_T > 0
        versions = track.versions_T[sampled]
        known = track.engine_T[~np.isnan(track.engine_T)]
        return {
            "name": track.name,
            "calls": track.calls,
            "spans": track.spans,
            "num_tokens": len(track.ids_T),
            "tokens": track.count_states(),
            "advantage": track.advantage,
            "step": track.step,
            "versions": [int(versions.min()), int(versions.max())] if len(versions) else None,
            "engine_mean": float(known.mean()) if len(known) else None,
            "gap": {
                "mean": float(np.nanmean(gaps_T)),
                "p99": float(np.nanquantile(gaps_T, 0.99)),
                "max": float(np.nanmax(gaps_T)),
                "at": int(np.nanargmax(gaps_T)),
            }
            if has_gaps
            else None,
            "fork": None
            if fork is None
            else {
                "call": fork.call,
                "other_track": fork.other_track,
                "other_call": fork.other_call,
                "shared": fork.num_shared,
                "reason": fork.reason,
                "explanation": fork.explanation,
                "message": fork.message,
            },
        }


def _render_floats(values: Any) -> list[float | None]:
    """Round to the seven digits that single precision holds; NaN and infinities are null."""
    finite = np.isfinite(values)
    return [
        float(f"{value:.7g}") if known else None for value, known in zip(values.tolist(), finite.tolist(), strict=True)
    ]
