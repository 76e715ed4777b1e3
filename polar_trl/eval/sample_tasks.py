"""Sample each task several times, into a folder of graded sessions that a later start goes on with.

    OUT/settings.json    what the sessions were made with
    OUT/results.jsonl    a line per session that ended: `SampleResult`
    OUT/sessions/START/  their records (`polar_trl.recording.log`), a folder per start

A line is written when its session ends; a kill loses the sessions in flight and nothing else, and a line that it tore
is taken back. A session without a reward says nothing of the model: its sample is tried again, as another session with
a record of its own, up to a number of attempts. Results of another setting, and a folder of something else, are never
added to (`ConfigError`). Where session after session fails, the machine has to be looked at: that ends the evaluation.
Attempts that a busy server turned away are no fault of ours: a later start does not count them.
"""

import fcntl
import json
import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from polar_trl.errors import ConfigError, PolarError, RecordError
from polar_trl.grade.base import PASSING_REWARD
from polar_trl.rollout.reasons import find_reason, find_shortfall
from polar_trl.rollout.runner import Job, RolloutResult, RolloutRunner
from polar_trl.run_folder import (
    LOCK_FILE,
    LOG_FILE,
    ROWS_FOLDER,
    SETTINGS_FILE,
    TRAINED_FILE,
    FolderLock,
    append_lines,
    disk_errors,
    make_output_dir,
    write_whole,
)
from polar_trl.types import ErrorKind, Task

RESULTS_FILE = "results.jsonl"
_FOREIGN = (TRAINED_FILE, LOG_FILE, ROWS_FOLDER, "config.json", "adapter_config.json")
"""Names that a folder of something else has: a run or a model."""
_FEWEST_FAILURES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleResult:
    """One session that ended: a line of `results.jsonl`."""

    task: str
    sample: int
    """From 0."""
    attempt: int
    """From 1; above that, earlier ones of this sample ended without a reward."""
    rollout: str
    record: str
    """Path of the session's record, relative to the folder."""
    repo: str | None
    """Of `find_repo`."""
    reward: float | None
    """None: the infrastructure failed, and `error` says how."""
    error: str | None
    stop_reason: str
    calls: int
    sampled_tokens: int
    """Of text-only sessions, as their server counted."""
    seconds: Mapping[str, float]
    """As in `Rollout`."""
    error_kind: ErrorKind | None = None
    """As in `Rollout`; None in lines of earlier versions."""
    reason: str | None = None
    """Why it did not pass (`polar_trl.rollout.reasons`); None where it did, and in lines of earlier versions."""
    detail: str = ""
    """What this session said of that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One session to run."""

    place: int
    """Of its task in the task set; ids may hold what a file's name may not."""
    task: Task
    sample: int
    attempt: int


@contextmanager
def open_folder(folder: Path, settings: Mapping[str, Any]) -> Iterator[list[SampleResult]]:
    """Lock the folder for the block, against other processes; the results that are there already.

    Args:
        folder: New, empty, or of an earlier start with the same settings (any, where no session had ended).
        settings: What decides the results, by name (JSON values), and `tokenizer`, where the model's lies, which may
            change. A `served_name` of None is one that could not be asked for, and counts as unchanged.

    Raises `ConfigError` where the folder holds anything else, and names the setting that differs.
    """
    path = folder / SETTINGS_FILE
    make_output_dir(folder)
    there = sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK_FILE)
    if found := [name for name in there if name in _FOREIGN or SETTINGS_FILE not in there]:
        raise ConfigError(
            f"output_dir {folder} holds {found[0]}: it is the folder of something else, and must be new, empty or "
            "what an earlier start left; name another output_dir"
        )
    with FolderLock(folder) as lock:
        before, results = read_settings(folder), read_results(folder, mend=True)
        if results:
            _require_same(folder, before, settings)
            settings = before | {name: value for name, value in settings.items() if value is not None}
        elif before and set(before) != set(settings):
            raise ConfigError(f"{path} is of something else; name another output_dir")
        if before != json.loads(json.dumps(settings)):  # a start that failed early decides nothing
            write_whole(path, (json.dumps(settings, indent=1, sort_keys=True) + "\n").encode())
        lock.share()  # which keeps others out as well, and which engines of this evaluation share
        yield results


@contextmanager
def share_folder(folder: Path) -> Iterator[None]:
    """Share the lock of the process that started this one: no other command opens the folder inside the block.

    Raises `ConfigError` if another command has it already.
    """
    with FolderLock(folder, shared=True):
        yield


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of the folder's sessions; none where no start has written any. Raises `ConfigError`."""
    path = folder / SETTINGS_FILE
    return _parse_settings(path, path.read_text(encoding="utf-8", errors="replace") if path.exists() else "")


def read_results(folder: Path, *, mend: bool = False) -> list[SampleResult]:
    """Read `results.jsonl`; no lines where there is no such file. A torn last line is left out.

    Args:
        mend: Cut the torn line off the file. Only while nobody writes to it.

    Raises `RecordError` for any other line that is no result.
    """
    path = folder / RESULTS_FILE
    if not path.exists():
        return []
    data = path.read_bytes()
    whole, newline, torn = data.rpartition(b"\n")
    if torn and mend:
        os.truncate(path, len(whole) + len(newline))
    names = {spec.name for spec in fields(SampleResult)}
    results = []
    for number, line in enumerate(whole.split(b"\n") if newline else [], start=1):
        try:
            values = {"error_kind": None, "reason": None, "detail": ""} | json.loads(line)
            results.append(SampleResult(**{name: values[name] for name in names}))
        except (ValueError, TypeError, KeyError) as error:
            raise RecordError(
                f"{path}, line {number}: no result of a session ({error!r}). Take the line out: that sample then runs "
                "again"
            ) from error
    return results


def list_samples(
    tasks: Sequence[Task], results: Sequence[SampleResult], *, num_samples: int, max_attempts: int
) -> list[Sample]:
    """List the samples that are left to run: each task once, then each task a second time, and so on.

    Raises `ConfigError` for two tasks of one id.
    """
    if twice := [name for name, count in Counter(task.id for task in tasks).items() if count > 1]:
        raise ConfigError(f"two tasks have the id {twice[0]!r}; results are kept by it")
    graded = {(result.task, result.sample) for result in results if result.reward is not None}
    attempts = Counter((result.task, result.sample) for result in results)
    failures = Counter((result.task, result.sample) for result in results if result.error_kind != "engine_busy")
    return [
        Sample(place=place, task=task, sample=sample, attempt=attempts[task.id, sample] + 1)
        for sample in range(num_samples)
        for place, task in enumerate(tasks)
        if (task.id, sample) not in graded and failures[task.id, sample] < max_attempts
    ]


def sample_tasks(
    runner: RolloutRunner,
    samples: Sequence[Sample],
    folder: Path,
    *,
    max_attempts: int,
    show_progress: bool = False,
) -> None:
    """Run the samples, and those without a reward again; each result is on disk as its session ends.

    As many sessions are open as keep every stage of the runner busy, and no more.

    Args:
        folder: Opened by `open_folder`, here or in the process that started this one.

    Raises:
        PolarError: as many sessions in a row failed as may be open.
        LawError, KeyboardInterrupt: as `RolloutRunner.run`.
    """
    start = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"  # each start and each engine has its own
    config = runner.config
    width = 2 * config.max_agents + config.max_preparing + config.max_grading
    waiting, running = deque(samples), dict[str, Sample]()
    failures: list[str] = []
    graded = passed = 0
    with tqdm(total=len(samples), desc="sessions", unit="session", disable=None if show_progress else True) as bar:
        while waiting or running:
            while waiting and len(running) < width:
                sample = waiting.popleft()
                job = _build_job(sample, folder / "sessions" / start)
                running[job.rollout_id] = sample
                runner.start([job])
            (finished,) = runner.take_finished()
            sample = running.pop(finished.rollout.id)
            result = _build_result(sample, finished, f"sessions/{start}/{finished.rollout.id}.jsonl")
            _append(folder / RESULTS_FILE, result)
            if result.reward is not None:
                failures.clear()
                graded, passed = graded + 1, passed + (result.reward >= PASSING_REWARD)
            else:
                failures.append(result.error or "no grader gave it a reward")
                if sample.attempt < max_attempts:
                    waiting.append(replace(sample, attempt=sample.attempt + 1))
                    bar.total += 1
            bar.set_postfix(passed=f"{passed}/{graded}", refresh=False)
            bar.update(1)
            if len(failures) >= max(_FEWEST_FAILURES, width) and (waiting or running):
                runner.close()
                raise PolarError(
                    f"the last {len(failures)} sessions all ended without a reward, most often: "
                    f"{Counter(failures).most_common(1)[0][0]}. Nothing more was started; the same command goes on"
                )


def find_repo(task: Task) -> str | None:
    """Find the repository or package of a task; None where its metadata does not say."""
    swebench, harbor = task.metadata.get("swebench", {}), task.metadata.get("harbor", {})
    repo = task.metadata.get("repo") or swebench.get("repo") or harbor.get("metadata", {}).get("package")
    return None if repo is None else str(repo)


def _build_job(sample: Sample, folder: Path) -> Job:
    rollout_id = f"t{sample.place:05d}-s{sample.sample:03d}-a{sample.attempt}"
    return Job(
        rollout_id=rollout_id,
        group_id=rollout_id,  # each session is handed out as it ends
        task=sample.task,
        record_path=folder / f"{rollout_id}.jsonl",
    )


def _build_result(sample: Sample, finished: RolloutResult, record: str) -> SampleResult:
    rollout = finished.rollout
    reason = find_reason(rollout)
    if reason is None and rollout.reward is not None and rollout.reward < PASSING_REWARD:
        reason = find_shortfall(rollout)
    return SampleResult(
        task=sample.task.id,
        sample=sample.sample,
        attempt=sample.attempt,
        rollout=rollout.id,
        record=record,
        repo=find_repo(sample.task),
        reward=rollout.reward,
        error=rollout.error,
        stop_reason=rollout.stop_reason,
        calls=len(rollout.calls),
        sampled_tokens=sum(len(call.completion.token_ids) for call in rollout.calls)
        + rollout.counters.get("tokens_by_server", 0),
        seconds={name: round(value, 3) for name, value in rollout.seconds.items()},
        error_kind=rollout.error_kind,
        reason=reason.name if reason else None,
        detail=reason.detail if reason else "",
    )


def _append(path: Path, result: SampleResult) -> None:
    """Append one line under a lock: processes of one evaluation share the file, and a killed one may have torn one."""
    line = json.dumps(asdict(result), ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
    with path.open("a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        start = os.fstat(file.fileno()).st_size
        if start and os.pread(file.fileno(), 1, start - 1) != b"\n":
            file.truncate(path.read_bytes().rfind(b"\n") + 1)
        with disk_errors(path):
            append_lines(path, line)


def _parse_settings(path: Path, text: str) -> dict[str, Any]:
    """Parse the settings; none where a start was killed before it wrote any."""
    try:
        before = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}; name another output_dir") from error
    if not isinstance(before, dict):
        raise ConfigError(f"{path} is of something else; name another output_dir")
    if before.get("model_label") == "policy":  # a setting once; now it is always that
        del before["model_label"]
    return before


def _require_same(folder: Path, before: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    now = json.loads(json.dumps(settings))
    for name in [*now, *(name for name in before if name not in now)]:
        unknown = name == "served_name" and None in (before.get(name), now.get(name))
        if name != "tokenizer" and not unknown and before.get(name) != now.get(name):
            if name not in before:
                raise ConfigError(
                    f"{folder / SETTINGS_FILE} does not say what the results beside it were made with ({name} is "
                    "missing); name another output_dir"
                )
            raise ConfigError(
                f"output_dir {folder} holds results with another setting: {name} is {now.get(name)!r} and was "
                f"{before.get(name)!r}; set it back, or name another output_dir"
            )
