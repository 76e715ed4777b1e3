"""Index the session records of a run, one `Entry` per file, kept up to date while the run writes.

The files are RUN/sessions/**/*.jsonl. A finished session is read once, at its two ends; one that is being written is
read from where the last look stopped. So a table never parses a session's tokens twice.
"""

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from polar_trl.errors import RecordError
from polar_trl.reconstruct import BUILDERS, Reconstruction, count_as_policy, count_calls
from polar_trl.recording.log import SessionRecord, read_record
from polar_trl.rollout.ending import name_exit
from polar_trl.rollout.reasons import find_reason
from polar_trl.sandbox.owner import is_dead, is_running
from polar_trl.types import AgentExit, Rollout

HEAD_BYTES = 4096
TAILS_BYTES = (65536, 1 << 20)
"""Where the end of a session is looked for; that of one with a long diff and much output is longer."""
LOOK_S = 0.5
"""Looks at the folder are at least so far apart."""
QUIET_S = 900.0
"""After so long without a byte a session counts as cut off, where its process cannot be seen from here."""
BEGIN_S = 10.0
"""A record gets its first line right after its file; one that has none after so long will get none."""
LOST_END = "the record is damaged: the session had an end, which is not in its file any more"
_END = b'\n{"type":"end"'


@dataclass(slots=True, eq=False)
class Entry:
    """The facts of one session that the table shows."""

    key: str
    """Path below `sessions`, without the suffix."""
    path: Path
    rollout: str = ""
    task: str = ""
    group: str = ""
    owner: str = ""
    """Tag of the process that writes it; "" in older records."""
    finished: bool = False
    stop_reason: str | None = None
    agent: str | None = None
    """That played it; None in records from before this was kept, and of sessions without an end."""
    reward: float | None = None
    error: str | None = None
    ended: str | None = None
    """Why it did not end as it should, as `polar_trl.rollout.reasons` says it, or "completed"."""
    detail: str = ""
    """What it said of that."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    num_calls: int = 0
    sampled_tokens: int = 0
    trajectories: int | None = None
    """None until it has been counted."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Drop reason of the reconstruction -> sampled tokens."""
    problem: str | None = None
    """Why the file cannot be read."""
    counted: bool = False
    """Whether calls, tokens and trajectories are final."""
    size: int = -1
    """Bytes at the last look; -1 before the first."""
    changed_s: float = 0.0
    offset: int = 0
    """Bytes that have been read of a session that is being written."""

    @property
    def attempt(self) -> str:
        """Folder of the process run that made it; "" where there is none."""
        return self.key.split("/")[0] if "/" in self.key else ""

    @property
    def batch(self) -> str:
        """Folder of its batch, such as "train_00003"; "" where there is none, as in evaluations."""
        return self.key.rsplit("/", 2)[-2] if self.key.count("/") > 1 else ""


class SessionIndex:
    """All sessions of a folder. Threads may share it.

    Args:
        folder: The one with the sessions; it may not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._open: dict[str, Entry] = {}
        """Those without an end."""
        self._listed: dict[str, int] = {}
        """Folder -> its time of change when it was listed."""
        self._folders: dict[str, list[str]] = {}
        """Folder -> the folders in it, as of then."""
        self._looked_s = 0.0
        self.version = 0
        """Grows with every change."""

    def refresh(self) -> list[Entry]:
        """Return all entries, after a look at the files that have changed."""
        with self._lock:
            if time.monotonic() - self._looked_s >= LOOK_S:
                self._look()
                self._looked_s = time.monotonic()
            return list(self._entries.values())

    def get(self, key: str) -> Entry | None:
        """Find one session, by its key only: no path from outside is ever opened."""
        with self._lock:
            return self._entries.get(key)

    def read(self, entry: Entry) -> SessionRecord:
        """Read a session's whole record. A fault in it, which no table sees, is the entry's problem from then on.

        Raises `RecordError`.
        """
        try:
            record = read_record(entry.path)
        except RecordError as error:
            if not isinstance(error.__cause__, OSError):  # the file may be there again
                self._note_problem(entry, _explain(entry.path, error))
            raise
        if entry.finished and not record.finished:
            self._note_problem(entry, LOST_END)
        return record

    def count_next(self) -> bool:
        """Count calls, tokens and trajectories of one finished session without a summary; False if none is left."""
        with self._lock:
            waiting = next((entry for entry in self._entries.values() if entry.finished and not entry.counted), None)
        if waiting is None:
            return False
        summary: Mapping[str, Any] = {}
        problem = None
        try:
            record = read_record(waiting.path)
            summary = count_calls(record.rollout, reconstruct(record))
        except Exception as error:  # noqa: BLE001 - whatever a file holds, the sessions after it get their counts
            problem = _explain(waiting.path, error)
        with self._lock:
            _set_summary(waiting, summary)
            waiting.problem = waiting.problem or problem
            self.version += 1
        return True

    def _note_problem(self, entry: Entry, problem: str) -> None:
        with self._lock:
            if entry.problem is None:
                entry.problem = problem
                self.version += 1

    def _look(self) -> None:
        found = list(self._list_new(self._folder, ""))
        changed = 0
        for entry in found:
            self._entries[entry.key] = entry
            self._open[entry.key] = entry
        for key, entry in list(self._open.items()):
            changed += _read_more(entry)
            if entry.finished or entry.problem:
                del self._open[key]
        self.version += bool(found) or bool(changed)

    def _list_new(self, folder: Path, prefix: str) -> Iterator[Entry]:
        """Yield sessions not seen before, in folders that have changed."""
        try:
            changed = folder.stat().st_mtime_ns
        except OSError:
            return
        known = self._listed.get(prefix)
        # within the resolution of a file system's clock a later file may not show
        is_settled = known == changed and time.time_ns() - changed > 2_000_000_000
        if is_settled:
            for name in self._folders[prefix]:
                yield from self._list_new(folder / name, f"{prefix}{name}/")
            return
        self._listed[prefix] = changed
        folders = self._folders[prefix] = []
        with os.scandir(folder) as children_on_disk:
            for child in sorted(children_on_disk, key=lambda item: item.name):
                if child.is_dir(follow_symlinks=False):
                    folders.append(child.name)
                    yield from self._list_new(folder / child.name, f"{prefix}{child.name}/")
                elif child.name.endswith(".jsonl") and child.is_file(follow_symlinks=False):
                    key = prefix + child.name.removesuffix(".jsonl")
                    if key not in self._entries:
                        yield Entry(key=key, path=folder / child.name, rollout=key.rsplit("/", 1)[-1])


def reconstruct(record: SessionRecord) -> Reconstruction:
    """Rebuild the trajectories of a session with the builder that its run used."""
    builder = BUILDERS.get(str(record.extra.get("builder")), BUILDERS["prefix_merging"])
    return builder(count_as_policy(record.rollout) if record.extra.get("train_auxiliary") else record.rollout)


def is_alive(entry: Entry, now_s: float) -> bool:
    """Tell whether a session without an end may still get one."""
    if entry.finished or entry.problem or is_dead(entry.owner):
        return False
    # a run on another machine that shares the folder has no process here
    return is_running(entry.owner) or now_s - entry.changed_s < QUIET_S


def is_beginning(entry: Entry) -> bool:
    """Tell whether a session's file has no whole line yet."""
    return not entry.finished and not entry.offset and entry.problem is None


def parse_line(text: bytes) -> dict[str, Any]:
    """Parse a line of a record or of a row file. Raises `ValueError`."""
    try:
        line = orjson.loads(text)
    except orjson.JSONDecodeError:  # lone surrogates, non-finite numbers
        line = json.loads(text.decode("utf-8", "surrogatepass"))
    if not isinstance(line, dict):
        raise ValueError(f"expected a JSON object, got {type(line).__name__}")
    return line


def _read_more(entry: Entry) -> bool:
    """Read the lines written since the last look; return whether there were any."""
    try:
        status = entry.path.stat()
        has_grown = status.st_size != entry.size
        if has_grown:
            with entry.path.open("rb") as file:
                if entry.offset == 0:
                    _read_ends(entry, file, status.st_size)
                if not entry.finished:
                    _read_lines(entry, file)
        if is_beginning(entry) and time.time() - status.st_mtime > BEGIN_S:
            raise ValueError("holds no session")
    except KeyError as error:
        entry.problem = f"cannot be read: {error} is missing"
        return True
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        entry.problem = f"cannot be read: {error}"
        return True
    entry.size, entry.changed_s = status.st_size, status.st_mtime
    return has_grown


def _read_ends(entry: Entry, file: BinaryIO, size: int) -> None:
    """Read the first and the last line: all that a finished session needs."""
    head, newline, _ = file.read(HEAD_BYTES).partition(b"\n")
    if head[:1] not in (b"", b"{"):
        raise ValueError("holds no session")
    if not newline:
        return
    _take_header(entry, parse_line(head))
    for num_bytes in TAILS_BYTES:
        file.seek(max(0, size - num_bytes))
        tail = file.read(num_bytes)
        start = tail.rfind(_END)
        if start >= 0 and tail.endswith(b"}\n"):
            _take_end(entry, parse_line(tail[start + 1 :]))
        if start >= 0 or num_bytes >= size:
            return


def _read_lines(entry: Entry, file: BinaryIO) -> None:
    """Read whole lines from where the last look stopped."""
    file.seek(entry.offset)
    for text in file:
        if not text.endswith(b"\n"):
            break
        line = parse_line(text)
        if line["type"] == "session":
            _take_header(entry, line)
        elif line["type"] == "call":
            entry.num_calls += 1
            entry.sampled_tokens += len(line["completion"]["token_ids"])
        elif line["type"] == "end":
            _take_end(entry, line)
        entry.offset += len(text)


def _take_header(entry: Entry, line: Mapping[str, Any]) -> None:
    entry.rollout, entry.task, entry.group = str(line["session_id"]), str(line["task_id"]), str(line["group_id"])
    entry.owner = str(line.get("owner", ""))


def _take_end(entry: Entry, line: Mapping[str, Any]) -> None:
    """Take the end of a session from its line: all of it, or nothing where a field is of a wrong type."""
    reasons = {name: _check({"agent": None, **line}, name, str, None) for name in ("stop_reason", "error", "agent")}
    reward = _check(line, "reward", int, float, None)
    seconds, extra = _check_numbers(line, "seconds"), _check(line, "extra", dict)
    if "summary" in extra:
        summary = _check(extra, "summary", dict)
        if summary:
            for name in ("calls", "sampled_tokens", "trajectories"):
                _check(summary, name, int)
            _check_numbers(summary, "dropped")
        _set_summary(entry, summary)
    entry.stop_reason, entry.error, entry.agent, entry.reward, entry.seconds = *reasons.values(), reward, seconds
    entry.ended, entry.detail = _explain_end(line)
    entry.finished = True


def _explain_end(line: Mapping[str, Any]) -> tuple[str, str]:
    """Name how a session ended, and quote it, from its last line alone.

    Of records of earlier releases, which do not have the reason, faults of the last reply are not seen.
    """
    if "reason" in line["extra"]:
        reason = _check(line["extra"], "reason", dict)
        return _check(reason, "name", str), _check(reason, "detail", str)
    later = {"error_kind": None, "agent_exit": None, **line}  # older records lack these
    kind, exits = _check(later, "error_kind", str, None), _check(later, "agent_exit", dict, None)
    ended = None if exits is None else AgentExit(**exits)
    if kind is None and line["error"] is not None:
        return "failed", line["error"]
    if kind is None and line["stop_reason"] == "agent_failed":
        said = "" if ended is None else ended.output_tail.strip()
        return (f"agent {name_exit(ended)}" if ended else "agent failed"), said.rpartition("\n")[2][:300]
    reason = find_reason(
        Rollout(
            id="", task_id="", group_id="", stop_reason=line["stop_reason"], error=line["error"], error_kind=kind,
            agent_exit=ended, counters=_check({"counters": {}, **line}, "counters", dict),
        )
    )  # fmt: skip
    return ("completed", "") if reason is None else (reason.name, reason.detail)


def _check(line: Mapping[str, Any], name: str, *kinds: type | None) -> Any:
    """Return a field's value. Raises `ValueError` for one of another type."""
    value = line[name]
    if isinstance(value, bool) or not any(
        value is None if kind is None else isinstance(value, kind) for kind in kinds
    ):
        raise ValueError(f"{name} is {json.dumps(value)[:80]}")
    if isinstance(value, int):
        float(value)  # one that no float holds cannot be summed with others
    return value


def _check_numbers(line: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    values: dict[str, Any] = _check(line, name, dict)
    for key in values:
        if not math.isfinite(_check(values, key, int, float)):
            raise ValueError(f"{name}: {key} is {values[key]}")
    return values


def _explain(path: Path, error: Exception) -> str:
    """Word an error without the path, so that one fault in many files is one reason."""
    reason = str(error) or type(error).__name__
    return "cannot be read: " + reason.removeprefix(f"{path}, ").removeprefix(f"{path}: ")


def _set_summary(entry: Entry, summary: Mapping[str, Any]) -> None:
    entry.counted = True
    if summary:
        entry.num_calls, entry.sampled_tokens = summary["calls"], summary["sampled_tokens"]
        entry.trajectories, entry.dropped = summary["trajectories"], summary["dropped"]
