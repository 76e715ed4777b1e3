"""One session, opened: its record and rows -> everything that its page asks for, worked out once and kept small.

Token texts and lines are made when a lane is looked at. It refuses to keep prompts of calls, which a record holds
over and over; a lane holds each token once.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polar_trl.recording.log import SessionRecord
from polar_trl.tools.inspector.conversation import build_calls, clean, read_text
from polar_trl.tools.inspector.forks import Fork, build_excerpts, find_fork
from polar_trl.tools.inspector.lanes import STATES, build_lanes, total_states
from polar_trl.tools.inspector.layout import Lines, build_lines
from polar_trl.tools.inspector.rows import Fate, TrainedRow
from polar_trl.tools.inspector.vocabulary import Pieces, Vocabulary

MAX_LINES = 400
"""Of one answer."""
MIN_COLUMNS, MAX_COLUMNS = 20, 400


class SessionView:
    """An opened session. Threads may share it.

    Args:
        record: What its file holds.
        fate: What the trainer made of it, if that is known.
        rows: What was trained of it.
        max_tokens: The run's `max_trajectory_tokens`, where it says.
    """

    def __init__(
        self,
        record: SessionRecord,
        fate: Fate | None,
        rows: Sequence[TrainedRow],
        vocabulary: Vocabulary,
        max_tokens: int | None = None,
    ) -> None:
        rollout = record.rollout
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._pieces: dict[int, Pieces] = {}
        self._lines: dict[tuple[int, int], Lines] = {}
        self.lanes = build_lanes(record, fate, rows, max_tokens)
        self.forks: dict[int, Fork] = {}
        num_trajectories = sum(lane.name.startswith("trajectory") for lane in self.lanes)
        for number, lane in enumerate(self.lanes):
            fork = find_fork(lane, self.lanes[: min(number, num_trajectories)], rollout.calls) if number else None
            if fork is not None:
                self.forks[number] = fork
        self._references = {fork.call: fork.other_call for fork in self.forks.values()}
        self._lane_of_call = {index: number for number, lane in enumerate(self.lanes) for index in lane.calls}
        self._num_prompt = [len(call.prompt_ids) for call in rollout.calls]
        self._calls = tuple(replace(call, prompt_ids=()) for call in rollout.calls)
        self.counters = {**rollout.counters}
        self.fate = fate

    def build_meta(self) -> dict[str, Any]:
        """JSON of what the page shows first: calls and lanes without their contents."""
        return {
            "calls": [self._build_call_meta(index) for index in range(len(self._calls))],
            "lanes": [self._build_lane_meta(number) for number in range(len(self.lanes))],
            "tokens": total_states(self.lanes),
            "counters": self.counters,
            "dropped": None if self.fate is None else self.fate.dropped,
            "has_rows": self.fate is not None,
            "vocabulary": {"known": self._vocabulary.is_known, "note": self._vocabulary.note},
            "states": STATES,
        }

    def build_calls(self, first: int, count: int) -> list[dict[str, Any]]:
        """JSON of the contents of some calls."""
        return build_calls(self._calls, first, count, self._references)

    def read_text(self, call: int, part: str, offset: int) -> dict[str, Any]:
        """A block of one text. Raises `KeyError`, `IndexError` for what is not there."""
        return read_text(self._calls[call], part, offset)

    def build_fork(self, lane: int) -> dict[str, Any]:
        """JSON of both texts around the first difference. Raises `KeyError` for a lane without a fork."""
        fork = self.forks[lane]
        return build_excerpts(fork, self.lanes[lane], self.lanes[fork.other_lane], self._vocabulary)

    def build_lines(self, lane: int, columns: int, first: int, count: int) -> dict[str, Any]:
        """JSON of some lines of a lane: `starts` of the lines, then per token its columns.

        Raises `IndexError` for a lane that is not there.
        """
        pieces, lines = self._lay_out(lane, columns)
        count = max(0, min(count, MAX_LINES))
        start, end = lines.tokens_of(first, count)
        here = self.lanes[lane]
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

    def build_overview(self, lane: int, columns: int, num_bins: int) -> dict[str, Any]:
        """JSON of the whole lane in a few bins of lines: of each the state sampled most, and extremes."""
        _, lines = self._lay_out(lane, columns)
        here = self.lanes[lane]
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

    def find_line(self, lane: int, columns: int, position: int) -> int:
        """The line that a token of a lane is on."""
        return self._lay_out(lane, columns)[1].find_line(position)

    def describe_token(self, lane: int, position: int) -> str:
        """Its bytes. Raises `IndexError`."""
        return self._vocabulary.describe(int(self.lanes[lane].ids_T[position]))

    def _lay_out(self, number: int, columns: int) -> tuple[Pieces, Lines]:
        columns = max(MIN_COLUMNS, min(columns, MAX_COLUMNS))
        lane = self.lanes[number]
        with self._lock:
            if number not in self._pieces:
                self._pieces[number] = self._vocabulary.spell(lane.ids_T.tolist())
            pieces = self._pieces[number]
            if (number, columns) not in self._lines:
                if len(self._lines) > 3 * len(self.lanes):  # a window that is being resized
                    self._lines.clear()
                edges = [edge for span in lane.spans for edge in span]
                self._lines[number, columns] = build_lines(pieces, edges, columns)
            return pieces, self._lines[number, columns]

    def _build_call_meta(self, index: int) -> dict[str, Any]:
        call = self._calls[index]
        completion = call.completion
        return {
            "index": index,
            "lane": self._lane_of_call.get(index),
            "dialect": call.dialect,
            "purpose": call.purpose,
            "prompt_tokens": self._num_prompt[index],
            "sampled_tokens": len(completion.token_ids),
            "seconds": round(call.duration_s, 3),
            "started_s": call.started_s,
            "finish_reason": completion.finish_reason,
            "versions": [completion.first_policy_version, completion.last_policy_version],
            "text_only": call.text_only,
            "stop_text": None if call.stop_text is None else clean(call.stop_text),
        }

    def _build_lane_meta(self, number: int) -> dict[str, Any]:
        lane, fork = self.lanes[number], self.forks.get(number)
        gaps_T = np.abs(lane.gaps_T)
        has_gaps = bool((~np.isnan(gaps_T)).any())
        sampled = lane.states_T > 0
        versions = lane.versions_T[sampled]
        known = lane.engine_T[~np.isnan(lane.engine_T)]
        return {
            "name": lane.name,
            "calls": lane.calls,
            "spans": lane.spans,
            "num_tokens": len(lane.ids_T),
            "tokens": lane.count_states(),
            "advantage": lane.advantage,
            "step": lane.step,
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
                "other_lane": fork.other_lane,
                "other_call": fork.other_call,
                "shared": fork.num_shared,
                "reason": fork.reason,
                "explanation": fork.explanation,
                "message": fork.message,
            },
        }


def _render_floats(values: Any) -> list[float | None]:
    """Seven digits, which is what single precision holds; NaN and infinities are null."""
    finite = np.isfinite(values)
    return [
        float(f"{value:.7g}") if known else None for value, known in zip(values.tolist(), finite.tolist(), strict=True)
    ]
