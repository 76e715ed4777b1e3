"""Load rows of SWE-bench Verified, SWE-Gym and SkyRL-v0-293 from a file, a folder or the datasets hub.

A task keeps its row's columns in `metadata["swebench"]` for the grader, the gold patch included; the agent gets the
problem statement and the row's image, with the repository at /testbed. Refuses rows that a grader could not decide
(`TaskError`): without tests that must pass, a test patch or a base commit.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polar_trl.errors import ConfigError, TaskError
from polar_trl.names import list_patched_paths
from polar_trl.tasks.rules import (
    COLUMNS,
    READ_COLUMNS,
    check_columns,
    check_task,
    collect_tasks,
    render_json,
    require_limit,
)
from polar_trl.types import Task, TestSpec

DATASETS = {
    "swe-bench-verified": ("SWE-bench/SWE-bench_Verified", "test"),
    "swe-gym": ("SWE-Gym/SWE-Gym", "train"),
    "skyrl-v0-293": ("NovaSky-AI/SkyRL-v0-293-data", "train"),
}
"""Data sets on the hub by name, with the split that is taken."""
HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<split>[\w.-]+))?")
"""Any other data set on the hub."""
SWEBENCH_IMAGE = ("swebench/sweb.eval.x86_64.{id}:latest", "_1776_")
SWE_GYM_IMAGE = ("xingyaoww/sweb.eval.x86_64.{id}:latest", "_s_")
"""Image name, and the text in place of the "__" of an instance id in it."""
WORKDIR = "/testbed"
KEPT = (
    *COLUMNS,
    # swebench 5 and SkyRL put scripts and images into rows; before, the package computed them
    *READ_COLUMNS,
    *("hints_text", "created_at", "environment_setup_commit", "difficulty", "eval_type", "image", "image_name"),
)


def load_swebench(
    source: str | Path, *, split: str | None = None, limit: int | None = None, endpoint: str | None = None
) -> list[Task]:
    """Load the tasks of a data set. Raises `TaskError`, and `ConfigError` where the source cannot be read.

    Args:
        source: As for `read_rows`.
        split: As for `read_rows`.
        limit: The first so many.
        endpoint: Address of the hub; None takes the usual one.
    """
    return build_swebench_tasks(read_rows(source, split=split, endpoint=endpoint), limit=limit)


def read_rows(
    source: str | Path, *, split: str | None = None, endpoint: str | None = None
) -> Iterator[Mapping[str, Any]]:
    """Read the rows of a data set. Raises `ConfigError` where there is none, and while reading `TaskError`.

    Args:
        source: A .parquet, .jsonl or .json file, a folder of them, a name from `DATASETS`, or on the hub "owner/name"
            or "owner/name:split".
        split: In a folder and on the hub: the files whose name begins with it. None takes the data set's own, or
            "train".
        endpoint: Address of the hub; None takes the usual one.
    """
    path = Path(source)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = [
            file
            for file in sorted(path.rglob("*"))
            if file.suffix in _READERS and (split is None or _is_of_split(file.name, split))
        ]
        if not files:
            raise ConfigError(
                f"{path} has no .parquet, .jsonl or .json file" + (f" of split {split!r}" * (split is not None))
            )
    else:
        files = _fetch(str(source), split, endpoint)
    return (row for file in files for row in _read_rows(file))


def build_swebench_tasks(rows: Iterable[Mapping[str, Any]], *, limit: int | None = None) -> list[Task]:
    """Build tasks from rows, such as a loaded `datasets.Dataset`. Raises `TaskError`."""
    require_limit(limit)
    numbered = ((f"row {index}", row) for index, row in enumerate(rows))
    tasks = collect_tasks(((where, parse_row(row, where)) for where, row in numbered), limit)
    if not tasks:
        raise TaskError("the data set has no rows")
    return tasks


def parse_row(row: Mapping[str, Any], where: str) -> Task:
    """Build the task of one row. Raises `TaskError` with the row's id and the column."""
    if not isinstance(row, Mapping):
        raise TaskError(f"{where}: a row is an object, not {type(row).__name__}")
    if "instance" in row:  # SkyRL puts the row of SWE-Gym into a column
        inner = _parse_json(row["instance"])
        if not isinstance(inner, Mapping):
            raise TaskError(f"{where}: 'instance' must be an object, not {row['instance']!r:.100}")
        row = inner
    if isinstance(row.get("instance_id"), str):
        where = f"{where} (task {row['instance_id']!r})"
    check_columns(row, where)
    fail_to_pass = _parse_ids(row, "FAIL_TO_PASS", where)
    if not fail_to_pass:
        raise TaskError(f"{where}: 'FAIL_TO_PASS' is empty")
    test_files = tuple(dict.fromkeys(list_patched_paths(row["test_patch"])))
    if not test_files:
        raise TaskError(f"{where}: 'test_patch' is no patch of git")
    kept = {name: render_json(row[name]) for name in KEPT if row.get(name) is not None}
    task = Task(
        id=row["instance_id"],
        instruction=_INSTRUCTION.format(repo=row["repo"], statement=row["problem_statement"].strip()),
        image=_find_image(row, where),
        workdir=WORKDIR,
        writable_root=True,  # eval scripts install into the image's own Python
        prepare_timeout_s=600.0,
        agent_timeout_s=1800.0,
        grade_timeout_s=1800.0,
        tests=TestSpec(
            runner="swebench",
            fail_to_pass=fail_to_pass,
            pass_to_pass=_parse_ids(row, "PASS_TO_PASS", where),
            protected=test_files,
        ),
        metadata={
            "swebench": kept,
            "unread": sorted(set(row) - {*KEPT, "FAIL_TO_PASS", "PASS_TO_PASS"}),
        },
    )
    check_task(task, where)
    return task


def _parse_ids(row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    """Parse a list of test ids, or its JSON text as SWE-bench has it."""
    value = _parse_json(row.get(name))
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(item, str) for item in value):
        raise TaskError(f"{where}: {name!r} must be a list of texts, not {row.get(name)!r:.100}")
    return tuple(value)


def _find_image(row: Mapping[str, Any], where: str) -> str:
    for name in ("image", "image_name"):
        if row.get(name) is not None:
            if not isinstance(row[name], str) or not row[name]:
                raise TaskError(f"{where}: {name!r} must be text, not {row[name]!r:.100}")
            return str(row[name])
    # this column tells the two families apart: SWE-Gym's rows never have it
    template, separator = SWEBENCH_IMAGE if row.get("environment_setup_commit") else SWE_GYM_IMAGE
    return template.format(id=row["instance_id"].lower().replace("__", separator))


def _fetch(source: str, split: str | None, endpoint: str | None) -> list[Path]:
    """Download the files of a data set on the hub into the hub's own cache."""
    found = HUB_NAME.fullmatch(source)
    if source.lower() in DATASETS:
        repo, own_split = DATASETS[source.lower()]
    elif found is not None:
        repo, own_split = found["repo"], found["split"] or "train"
    else:
        raise ConfigError(
            f"no file or folder {source!r}, and no data set of that name; there are {', '.join(DATASETS)}, "
            "and any 'owner/name' of the hub"
        )
    import httpx
    from huggingface_hub import HfApi, hf_hub_download

    split = split or own_split
    try:
        names = HfApi(endpoint=endpoint).list_repo_files(repo, repo_type="dataset")
        wanted = [n for n in sorted(names) if Path(n).suffix in _READERS and _is_of_split(Path(n).name, split)]
        files = [Path(hf_hub_download(repo, name, repo_type="dataset", endpoint=endpoint)) for name in wanted]
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ConfigError(
            f"cannot get the data set {repo} from the hub: {error}; a local file works as well"
        ) from error
    if not files:
        raise ConfigError(f"the data set {repo} has no .parquet, .jsonl or .json file of split {split!r}")
    return files


def _is_of_split(name: str, split: str) -> bool:
    """Return whether a file is of a split: "train.parquet" and "train-00000-of-00001.parquet" are of "train"."""
    return re.match(rf"{re.escape(split)}[-.]", name) is not None


def _read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise ConfigError(f"{path}: must be a {', '.join(_READERS)} file")
    try:
        yield from reader(path)
    except (OSError, ValueError) as error:
        raise TaskError(f"cannot read {path}: {error}") from error


def _read_parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow.parquet  # type: ignore[import-untyped]

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=64):
            yield from batch.to_pylist()


def _read_jsonl(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number} is not valid JSON: {error}") from error


def _read_json(path: Path) -> Iterator[Mapping[str, Any]]:
    rows = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        raise ValueError("must be a list of rows")
    yield from rows


_READERS = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".json": _read_json}


def _parse_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


_INSTRUCTION = """\
The current folder is a checkout of the repository {repo}. Change its source so that the issue below is resolved, and
leave everything else as it behaves now. Tests that you do not see decide; changes to test files are not taken over.

Issue:

{statement}
"""
