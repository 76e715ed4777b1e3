"""Index the trainer's row files: each rollout's outcome, and where the trainer's log-probabilities are on disk.

The files are RUN/rows/ATTEMPT/*.jsonl. Only appended lines are read, and of a row's line only what stands before its
log-probabilities; `read_rows` reads those of one session when its page is opened.
"""

import re
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar_trl.tools.inspector.sessions import parse_line

_VALUES = b'"logprobs"'
_FILE = re.compile(r"^(train|eval)_(\d+)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutOutcome:
    """The trainer's decision on a rollout: its reward, its advantage, or why it was dropped."""

    mode: str
    """"train" or "eval"."""
    step: int | None
    """The optimizer step that its batch is of; None where the file's name does not say."""
    reward: float | None
    advantage: float
    dropped: str | None
    """"no_reward", "cut" or "zero_variance"; None where it was to be trained."""
    reason: str | None = None
    """Why the session did not end as it should (`polar_trl.rollout.reasons`); None where it did."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRow:
    """One row as it was trained."""

    calls: tuple[int, ...]
    num_tokens: int
    trained: tuple[tuple[int, int], ...]
    """Spans [start, end) of the trajectory's tokens."""
    advantage: float
    step: int
    logprobs: tuple[float, ...]
    """The trainer's, nats, of the trained tokens in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    path: Path
    offset: int
    num_bytes: int
    step: int


class TrainedRowIndex:
    """Outcomes and trained rows of a run. Threads may share it.

    Args:
        folder: RUN/rows; it may not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._offsets: dict[Path, int] = {}
        self._outcomes: dict[str, RolloutOutcome] = {}
        self._places: dict[str, list[_Place]] = defaultdict(list)
        self.version = 0
        self.num_bad_lines = 0

    def refresh(self) -> None:
        """Read the lines appended since the last look."""
        with self._lock:
            for path in sorted(self._folder.rglob("*.jsonl")) if self._folder.is_dir() else []:
                if path.is_symlink():
                    continue
                offset = self._offsets.get(path, 0)
                if path.stat().st_size > offset:
                    self._offsets[path] = self._read(path, offset)
                    self.version += 1

    def find_outcome(self, key: str) -> RolloutOutcome | None:
        """Find a session's outcome by its key; None where the trainer has not decided, or wrote no rows."""
        return self._outcomes.get(key)

    def count_rows(self, key: str) -> int:
        """Count the lines that `read_rows` would read; they are only ever appended."""
        return len(self._places.get(key, ()))

    def read_rows(self, key: str) -> list[TrainedRow]:
        """Read a session's rows, each as first trained: later passes over a batch leave the engine's policy."""
        with self._lock:
            places = list(self._places.get(key, ()))
        first: dict[tuple[int, ...], TrainedRow] = {}
        for place in sorted(places, key=lambda place: place.step):
            with place.path.open("rb") as file:
                file.seek(place.offset)
                line = parse_line(file.read(place.num_bytes))
            row = TrainedRow(
                calls=tuple(line["calls"]),
                num_tokens=line["num_tokens"],
                trained=tuple((start, end) for start, end in line["trained"]),
                advantage=line["advantage"],
                step=line["step"],
                logprobs=tuple(line["logprobs"]),
            )
            first.setdefault(row.calls, row)
        return list(first.values())

    def _read(self, path: Path, offset: int) -> int:
        with path.open("rb") as file:
            file.seek(offset)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                try:
                    self._take(_parse_without_values(text), path, offset, len(text))
                except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                    self.num_bad_lines += 1
                offset += len(text)
        return offset

    def _take(self, line: Mapping[str, Any], path: Path, offset: int, num_bytes: int) -> None:
        key = str(line["record"]).removeprefix("sessions/").removesuffix(".jsonl")
        if line["type"] == "rollout":
            match = _FILE.match(path.stem)
            self._outcomes[key] = RolloutOutcome(
                mode=match[1] if match else "train",
                step=int(match[2]) if match else None,
                reward=None if line["reward"] is None else float(line["reward"]),
                advantage=float(line["advantage"] or 0.0),
                dropped=None if line["dropped"] is None else str(line["dropped"]),
                reason=str(line["reason"]) if line.get("reason") else None,
                detail=str(line.get("detail", "")),
            )
        elif line["type"] == "row":
            self._places[key].append(_Place(path=path, offset=offset, num_bytes=num_bytes, step=int(line["step"])))


def _parse_without_values(text: bytes) -> Mapping[str, Any]:
    """Parse a line without its "logprobs", where they come last; the whole line otherwise."""
    start = text.find(_VALUES)
    if start > 0:
        try:
            return parse_line(text[:start] + b'"logprobs":null}')
        except ValueError:
            pass
    return parse_line(text)
