"""Check a run's folder: every token that was trained must be one that a recorded session sampled.

Trajectories are rebuilt from the records and held against the laws, and against the digests that were stored when they
were trained; `rows/` and `trained.jsonl` are held against the records. A trained row whose record is gone or has lost
its end is a fault.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polar_trl.errors import ConfigError, LawError, RecordError
from polar_trl.reconstruct import BUILDERS, check_laws, count_as_policy, digest
from polar_trl.recording.log import SessionRecord, read_record
from polar_trl.run_folder import ROWS_FOLDER, TRAINED_FILE

Span = tuple[int, int]
"""Tokens of a row: [start, end)."""


@dataclass(kw_only=True, slots=True)
class ReplayReport:
    """Totals over the sessions of a replay; the keys of its JSON output."""

    sessions: int = 0
    unfinished: int = 0
    text_only: int = 0
    """Sessions of a server that gave no token ids: there is nothing to train, and no law to hold them against."""
    calls: int = 0
    trajectories: int = 0
    forks: int = 0
    sampled_tokens: int = 0
    trainable_tokens: int = 0
    """Of the rebuilt trajectories, trained or not."""
    dropped: Counter[str] = field(default_factory=Counter)
    digests_compared: int = 0
    digest_mismatches: int = 0
    rows_compared: int = 0
    """Lines of `rows/` about a trained row."""
    row_mismatches: int = 0
    steps_compared: int = 0
    """Lines of `trained.jsonl` whose rows are in this folder."""
    step_mismatches: int = 0
    trained_tokens: int = 0
    """Of those steps."""
    broken_laws: int = 0
    unreadable: int = 0

    @property
    def is_good(self) -> bool:
        faults = self.digest_mismatches, self.row_mismatches, self.step_mismatches, self.broken_laws, self.unreadable
        return not any(faults)


def replay(path: Path, builder: str, tell: Callable[[str], None]) -> ReplayReport:
    """Check a run's folder, or one session's file.

    Args:
        builder: How trajectories are rebuilt, a key of `BUILDERS`; digests have their own.
        tell: Called with a sentence about each fault.

    Raises:
        ConfigError: There is nothing to check.
    """
    report = ReplayReport()
    sessions: dict[str, _Session | None] = {}  # by path in the run's folder; None where it cannot be read
    for file in _find_sessions(path):
        name = file.relative_to(path).as_posix()
        sessions[name] = None
        try:
            record = read_record(file)
            sessions[name] = _Session.of(record)
            _replay_session(record, builder, file, report, tell)
        except RecordError as error:
            report.unreadable += 1
            tell(str(error))
        except LawError as error:
            report.broken_laws += 1
            tell(f"{file}: {error}")
    if path.is_dir():
        rows = _compare_rows(path, sessions, report, tell)
        _compare_steps(path, rows, report, tell)
    return report


@dataclass(frozen=True, kw_only=True, slots=True)
class _Session:
    """The sampled spans of a session, which rows are held against."""

    finished: bool
    spans: tuple[Span, ...]
    """Of each call, where its sampled tokens are in a row that ends with it or goes on from it."""

    @classmethod
    def of(cls, record: SessionRecord) -> "_Session":
        ends = [(len(call.prompt_ids), len(call.completion.token_ids)) for call in record.rollout.calls]
        return cls(finished=record.finished, spans=tuple((start, start + length) for start, length in ends))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A line of `rows/`; one that a resumed run trained again is equal to the first."""

    step: int
    rollout: str
    record: str
    calls: tuple[int, ...]
    num_tokens: int
    trained: tuple[Span, ...]

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "_Row":
        row = cls(
            step=int(line["step"]),
            rollout=str(line["rollout"]),
            record=str(line["record"]),
            calls=tuple(int(index) for index in line["calls"]),
            num_tokens=int(line["num_tokens"]),
            trained=tuple((int(start), int(end)) for start, end in line["trained"]),
        )
        if not row.num_trained == line["num_trainable"] == len(line["logprobs"]):
            raise ValueError("its spans, its count and its log-probabilities are not of one length")
        return row

    @property
    def num_trained(self) -> int:
        return sum(end - start for start, end in self.trained)


def _find_sessions(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder; give a run folder or one session's .jsonl file")
    found = sorted((path / "sessions").rglob("*.jsonl"))
    if not found:
        raise ConfigError(f"{path}: no sessions; a run folder holds them as sessions/**/*.jsonl")
    return found


def _replay_session(
    record: SessionRecord, builder: str, path: Path, report: ReplayReport, tell: Callable[[str], None]
) -> None:
    """Add one session to the report. Raises `LawError` or `RecordError`."""
    rollout = count_as_policy(record.rollout) if record.extra.get("train_auxiliary") else record.rollout
    reconstruction = BUILDERS[builder](rollout)
    report.sessions += 1
    report.unfinished += not record.finished
    report.calls += len(rollout.calls)
    report.trajectories += len(reconstruction.trajectories)
    report.forks += reconstruction.counters["forks"]
    num_sampled = sum(len(call.completion.token_ids) for call in rollout.calls)
    report.sampled_tokens += num_sampled
    report.trainable_tokens += sum(sum(trajectory.trainable) for trajectory in reconstruction.trajectories)
    report.dropped.update(reconstruction.dropped)
    stored = record.extra.get("trajectory_digest")
    if stored is not None:
        # The digest is of what was trained, whichever builder this replay was asked to show.
        trained_with = record.extra.get("builder", "prefix_merging")
        if not isinstance(trained_with, str) or trained_with not in BUILDERS:
            raise RecordError(
                f"{path}: trained with an unknown builder {trained_with!r}, known are {sorted(BUILDERS)}"
            )
        report.digests_compared += 1
        found = digest(BUILDERS[trained_with](rollout).trajectories)
        if found != stored:
            report.digest_mismatches += 1
            tell(f"{path}: trained on trajectories {stored}, the record gives {found}")
    if not num_sampled and any(call.text_only for call in rollout.calls):
        report.text_only += 1
    else:
        check_laws(rollout, reconstruction)


def _compare_rows(
    folder: Path, sessions: Mapping[str, _Session | None], report: ReplayReport, tell: Callable[[str], None]
) -> set[_Row]:
    """Read the rows that were trained, each held against its session."""
    rows = set()
    for path in sorted((folder / ROWS_FOLDER).rglob("train_*.jsonl")):
        for place, line in _read_lines(path, report, tell):
            if line.get("type") != "row":
                continue
            try:
                row = _Row.of(line)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                report.unreadable += 1
                tell(f"{place}: no row: {error!r}")
                continue
            rows.add(row)
            report.rows_compared += 1
            fault = _find_fault(row, sessions)
            if fault is not None:
                report.row_mismatches += 1
                tell(f"{place}: step {row.step} trained {row.record}, {fault}")
    return rows


def _find_fault(row: _Row, sessions: Mapping[str, _Session | None]) -> str | None:
    """Name the first field of a trained row that disagrees with its session record; None where all agree."""
    if row.record not in sessions:
        return "which is gone"
    session = sessions[row.record]
    if session is None:
        return "which cannot be read"
    if not session.finished:
        return "which has lost its end"
    if not row.calls or not all(0 <= index < len(session.spans) for index in row.calls):
        return f"calls {list(row.calls)}, and it has {len(session.spans)}"
    sampled = _join([session.spans[index] for index in row.calls])
    if row.num_tokens != sampled[-1][1]:
        return f"{row.num_tokens} tokens up to call {row.calls[-1]}, and it gives {sampled[-1][1]}"
    for start, end in row.trained:
        if not any(first <= start and end <= last for first, last in sampled):
            return f"tokens {start} to {end}, and it says that not all of them were sampled"
    return None


def _join(spans: Sequence[Span]) -> list[Span]:
    """Join spans that touch."""
    joined: list[Span] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined


def _compare_steps(folder: Path, rows: set[_Row], report: ReplayReport, tell: Callable[[str], None]) -> None:
    """Hold `trained.jsonl` against the rows. Steps of a run in another folder have no rows here: passed over."""
    by_step = defaultdict(list)
    for row in rows:
        by_step[row.step].append(row)
    expected = 1
    for place, line in _read_lines(folder / TRAINED_FILE, report, tell):
        try:
            step, rollouts, num_tokens = int(line["step"]), set(line["rollouts"]), int(line["tokens"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            report.unreadable += 1
            tell(f"{place}: no step: {error!r}")
            continue
        if step != expected:  # a line that is lost, or one that another process wrote
            report.step_mismatches += 1
            tell(f"{place}: step {step} where step {expected} comes next")
        expected = step + 1
        found = [row for row in by_step[step] if row.rollout in rollouts]
        if rollouts and not found:
            continue
        report.steps_compared += 1
        report.trained_tokens += num_tokens
        have, num_found = {row.rollout for row in found}, sum(row.num_trained for row in found)
        if have != rollouts or num_found != num_tokens:
            report.step_mismatches += 1
            said = f"{num_tokens} tokens of {len(rollouts)} rollouts"
            tell(f"{place}: step {step} trained {said}, {ROWS_FOLDER}/ has {num_found} of {len(have)}")


def _read_lines(
    path: Path, report: ReplayReport, tell: Callable[[str], None]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place of each line and its JSON object; the last line may be torn by a kill."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise ValueError("not an object")
            except (ValueError, RecursionError) as error:
                if text.endswith(b"\n"):
                    report.unreadable += 1
                    tell(f"{path}, line {number}: {error}")
                continue
            yield f"{path}, line {number}", line
