"""Write and read checkpoint folders from which a run goes on exactly, and find the newest such folder of a run.

The trainer of transformers writes a checkpoint file by file, and a kill can come between any two. What this module
adds is written last: `polar_state.json`, by a rename, with size and digest of every other file. A file
`polar_state.json.part` lies there from the first moment on, so that a folder that was begun and not finished is told
apart from one that somebody else made. A folder is never used unless all of its files are there as they were written,
and nothing is removed that was not begun here.
"""

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.trainer_pt_utils import safe_globals

from polar_trl.errors import ConfigError
from polar_trl.grpo.packing.forward import PackedRows
from polar_trl.grpo.packing.layout import Layout, Segment
from polar_trl.run_folder import SUMMARY_FILE, TRAINED_FILE

logger = logging.getLogger(__name__)

VERSION = 2
STATE_FILE = "polar_state.json"
PART_FILE = STATE_FILE + ".part"
GO_ON = '--resume_from_checkpoint auto (in Python: train(resume_from_checkpoint="auto"))'
"""What goes on with a run, as messages name it."""
RANK_FILE = "polar_rank{}.pt"
MASTERS_FILE = "polar_masters{}.safetensors"
_FOLDER = re.compile(r"checkpoint-(\d+)")
_REMOVED = "removed-"
_SAMPLE_BYTES = 1 << 20
_NUM_SAMPLES = 64
"""Of a file that is larger than all of them; hashing tens of gigabytes would double the time of a checkpoint."""
_SAVED_TYPES = [PackedRows, Layout, Segment, type(np.dtype(np.int64))]
"""Types that windows are made of, beside tensors. No other is read back: unpickling may run what it is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """The progress of a run's rollouts after an optimizer step, which transformers and TRL do not keep."""

    step: int
    """Optimizer steps that the weights have seen."""
    micro_step: int
    """Micro-steps so far, those before a restart included; they decide when it is time to roll out."""
    epochs: int
    """Passes over the tasks that are over; each shuffles anew."""
    num_batches: int
    """Generation and evaluation batches rolled out so far; the next one has this number."""
    policy_version: int
    """Of the engine."""
    seconds: float
    """Wall time of the run up to here, without what was lost to kills."""
    settings: Mapping[str, Any]
    """Those that decide which tasks come when (JSON values); they must stay as they were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """One rank's unfinished work between two optimizer steps."""

    windows: Sequence[list[dict[str, Any]]] = ()
    """Forward passes of the last generation batch, by optimizer step, if any of them is still to come."""
    open_task_ids: Sequence[str] = ()
    """Tasks of the sessions that were open when the checkpoint was written; they have to be started again."""
    open_agents: Sequence[str] = ()
    """The agent of each of them, "" where the run has one."""


# One folder.


def begin_checkpoint(folder: Path) -> None:
    """Mark the folder as one that is being written. One rank calls it, before any other writes.

    A damaged checkpoint of an earlier process, which went on from an older one, makes room.
    """
    if (folder / STATE_FILE).exists() or (folder / PART_FILE).exists():
        _remove(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PART_FILE).touch()


def save_rank_state(folder: Path, rank: int, state: RankState) -> None:
    """Write one rank's unfinished work."""
    windows = [[_without_caches(passed) for passed in window] for window in state.windows]
    opened = {"open_task_ids": list(state.open_task_ids), "open_agents": list(state.open_agents)}
    torch.save({"windows": windows, **opened}, folder / RANK_FILE.format(rank))


def save_masters(folder: Path, rank: int, low_halves: Mapping[str, torch.Tensor]) -> None:
    """Write the remainders of one rank's masters (`RoundedWeights.state_dict`)."""
    save_file({name: low.cpu() for name, low in low_halves.items()}, folder / MASTERS_FILE.format(rank))


def load_masters(folder: Path, rank: int) -> dict[str, torch.Tensor] | None:
    """Read remainders; rank 0's where all ranks hold the same. None: the checkpoint's weights are the masters."""
    for path in (folder / MASTERS_FILE.format(rank), folder / MASTERS_FILE.format(0)):
        if path.is_file():
            return load_file(path)
    return None


def finish_checkpoint(folder: Path, state: RunState, *, is_resumable: bool = True) -> None:
    """Declare the folder complete. One rank calls it, after all have written; it is on the disk when this returns.

    Args:
        is_resumable: False where only the model was saved.
    """
    sizes, digests = {}, {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != PART_FILE:
            name = str(path.relative_to(folder))
            sizes[name], digests[name] = path.stat().st_size, _digest(path)
            _flush(path)
    part = folder / PART_FILE
    content = {
        "version": VERSION,
        "is_resumable": is_resumable,
        **asdict(state),
        "files": sizes,
        "digests": digests,
    }
    part.write_text(json.dumps(content, indent=1) + "\n")
    _flush(part)
    part.replace(folder / STATE_FILE)
    # the names inside the folder, and its own
    for parent in (folder, folder.parent):
        _flush(parent)


def load_state(folder: Path, rank: int, device: torch.device) -> tuple[RunState, RankState]:
    """Read a complete checkpoint, tensors to `device`. Raises `ConfigError` if the run cannot go on from it."""
    if problem := find_problem(folder):
        raise ConfigError(f"resume_from_checkpoint: {folder} {problem}")
    content = _read_state(folder)
    state = RunState(**{spec.name: content[spec.name] for spec in fields(RunState)})
    path = folder / RANK_FILE.format(rank)
    if not path.is_file():
        raise ConfigError(f"resume_from_checkpoint: {folder} was written by fewer processes: {path.name} is missing")
    try:
        with safe_globals(), torch.serialization.safe_globals(_SAVED_TYPES):
            return state, RankState(**torch.load(path, map_location=device, weights_only=True))
    except Exception as error:
        # torch's own text is of several lines, and advises to run what the file holds
        found = re.search(r"WeightsUnpickler error: ([^\n]*)", str(error))
        reason = found[1] if found else type(error).__name__
        raise ConfigError(f"resume_from_checkpoint: {path} holds no state of a rank ({reason})") from error


def know_cpu_devices() -> None:
    """Let `torch.load` put tensors on "cpu:0" and the like, which is what accelerate calls several processes' CPU.

    transformers loads an optimizer so and fails.
    """
    torch.serialization.register_package(11, _tag_none, _put_on_cpu)


def _tag_none(_storage: Any) -> None:
    """Nothing is written with such a name."""


def _put_on_cpu(storage: Any, location: str) -> Any:
    return storage if location.startswith("cpu:") else None


def find_problem(folder: Path) -> str | None:
    """Name the reason why a run cannot go on from a folder, to be read after its name; None if it can."""
    if not folder.is_dir():
        return "is no folder"
    if not (folder / STATE_FILE).is_file():
        begun = (folder / PART_FILE).exists()
        return "was not written to its end" if begun else f"holds no {STATE_FILE}: it was not made by this trainer"
    try:
        content = _read_state(folder)
    except (OSError, ValueError, RecursionError) as error:
        return f"has a damaged {STATE_FILE} ({error})"
    if content["version"] != VERSION:
        return f"has version {content['version']!r} of the format; this package reads version {VERSION}"
    if not content["is_resumable"]:
        return "was saved with save_only_model: it holds no optimizer"
    if (match := _FOLDER.fullmatch(folder.name)) and int(match[1]) != content["step"]:
        return f"is named so and holds step {content['step']}"
    return _find_damage(folder, content["files"], content.get("digests", {}))


def _find_damage(folder: Path, sizes: Mapping[str, int], digests: Mapping[str, str]) -> str | None:
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"lacks {name}"
        if path.stat().st_size != size:
            return f"has {name} with {path.stat().st_size} bytes, and it was written with {size}"
        try:
            if name in digests and digests[name] != _digest(path):  # earlier versions wrote none
                return f"has {name} with another content than was written"
        except OSError as error:
            return f"has {name}, which cannot be read ({error.strerror})"
    return None


def _read_state(folder: Path) -> dict[str, Any]:
    """Read `polar_state.json`, of any version. Raises `ValueError` for one that was not written so."""
    content = json.loads((folder / STATE_FILE).read_bytes())
    if not isinstance(content, dict) or type(content.get("version")) is not int:
        raise ValueError("it has no version")
    if content["version"] != VERSION:
        return content
    kinds: dict[str, Any] = {"is_resumable": bool, "files": dict, "seconds": (int, float), "settings": dict}
    for name in ("is_resumable", "files", *(spec.name for spec in fields(RunState))):
        value = content.get(name)
        if not isinstance(value, kinds.get(name, int)) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{name} is {value!r}")
    return content


def _is_of_other_version(folder: Path) -> bool:
    return _peek_state(folder).get("version", VERSION) != VERSION


def _is_model_only(folder: Path) -> bool:
    return not _is_of_other_version(folder) and not _peek_state(folder).get("is_resumable", True)


def _peek_state(folder: Path) -> dict[str, Any]:
    """Read `polar_state.json`; empty where there is none or it is damaged."""
    try:
        return _read_state(folder)
    except (OSError, ValueError, RecursionError):
        return {}


def _digest(path: Path) -> str:
    state = hashlib.blake2b(digest_size=16)
    for sample in read_samples(path, number=_NUM_SAMPLES, num_bytes=_SAMPLE_BYTES):
        state.update(sample)
    return state.hexdigest()


def read_samples(path: Path, *, number: int, num_bytes: int) -> Iterator[bytes]:
    """Read so many pieces that are spread evenly over a file, both ends among them; a smaller file whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= number * num_bytes:
            yield file.read()
            return
        for index in range(number):
            file.seek((size - num_bytes) * index // (number - 1))
            yield file.read(num_bytes)


# The folders of a run.


def choose_checkpoint(output_dir: Path, wanted: str | bool | None) -> Path | None:
    """Choose the checkpoint that a run goes on from, by `resume_from_checkpoint`; None to begin.

    Args:
        wanted: "auto" or True: the newest complete one of `output_dir`, if any. A path: that one. None: begin.

    Raises:
        ConfigError: there is no such checkpoint, `output_dir` has newer ones, which a later "auto" would take, or its
            run cannot be gone on with and would be lost by a new one.
    """
    wanted = _parse_wanted(wanted)
    if wanted is True:
        _require_resumable(output_dir)
        return find_checkpoint(output_dir)
    if wanted is False:
        return None
    folder = Path(wanted)
    if problem := find_problem(folder):
        newest = find_checkpoint(output_dir)
        hint = f"; the newest complete one is {newest}" if newest else ""
        raise ConfigError(f"resume_from_checkpoint: {folder} {problem}{hint}")
    step = read_step(folder)
    newer = [path for other, path in list_checkpoints(output_dir) if other > step and find_problem(path) is None]
    if newer:
        raise ConfigError(
            f"resume_from_checkpoint: {output_dir} holds {newer[-1].name}, which is newer than {folder.name}: move it "
            "away to lose its steps, or name another output_dir"
        )
    if list_checkpoints(output_dir) and folder.resolve().parent != output_dir.resolve():
        raise ConfigError(
            f"resume_from_checkpoint: {folder} is of another run than those in {output_dir}; name another output_dir"
        )
    return folder


def find_checkpoint(output_dir: Path) -> Path | None:
    """Find the newest complete checkpoint; others that are newer are named in the log.

    Raises:
        ConfigError: one that is newer was written by another version of this package: a run that began anew beside
            it would count it as its own.
    """
    for _, folder in reversed(list_checkpoints(output_dir)):
        problem = find_problem(folder)
        if problem is None:
            return folder
        if _is_of_other_version(folder):
            raise ConfigError(f"{folder} {problem}: name another output_dir, or go on with the package that wrote it")
        logger.warning("%s %s; an older one is looked for", folder, problem)
    return None


def choose_start(output_dir: Path, wanted: str | bool | None) -> Path | None:
    """Choose as `choose_checkpoint`, and refuse (`ConfigError`) to begin a run in the folder of another."""
    for path in output_dir.glob("checkpoint-*"):
        if _FOLDER.fullmatch(path.name) and not path.is_dir():
            raise ConfigError(f"{path} is no folder, and a checkpoint would have to be one: move it away")
    folder = choose_checkpoint(output_dir, wanted)
    is_own = folder is not None and folder.resolve().parent == output_dir.resolve()
    held = list_run_files(output_dir)
    if held and not is_own and not wants_newest(wanted):
        _require_resumable(output_dir)
        raise ConfigError(
            f"output_dir {output_dir} holds a run already ({held[0]}): go on with it by {GO_ON}, or name another "
            "output_dir"
        )
    return folder


def explain_dead_end(output_dir: Path) -> str | None:
    """Say why the run in a folder cannot be gone on with, to be read after the folder's name; None if it can.

    One that was killed before its first checkpoint can: it begins again.
    """
    folders = [folder for _, folder in list_checkpoints(output_dir)]
    if any(find_problem(folder) is None or _is_of_other_version(folder) for folder in folders):
        return None
    if models := [folder.name for folder in folders if _is_model_only(folder)]:
        return (
            f"holds a run that cannot be gone on with: {models[-1]} was saved with save_only_model, without the "
            "optimizer"
        )
    if (output_dir / SUMMARY_FILE).exists():
        return "holds a run that is over and has no checkpoint to go on from"
    return None


def _require_resumable(output_dir: Path) -> None:
    if problem := explain_dead_end(output_dir):
        raise ConfigError(f"output_dir {output_dir} {problem}; name another output_dir")


def list_run_files(output_dir: Path) -> list[str]:
    """List what tells that a folder holds a run: names of files and folders, checkpoints first.

    Sessions alone do not: a start that made no optimizer step is no run.
    """
    held = [path.name for _, path in list_checkpoints(output_dir)]
    return held + [name for name in (TRAINED_FILE, SUMMARY_FILE) if (output_dir / name).exists()]


def remove_partial(output_dir: Path) -> None:
    """Remove the folders of checkpoints that were begun and not finished, or removed in part. One rank calls it."""
    for _, folder in list_checkpoints(output_dir):
        if (folder / PART_FILE).exists() and not (folder / STATE_FILE).exists():
            logger.warning("%s was not written to its end and is removed", folder)
            _remove(folder)
    for folder in output_dir.glob(f"{_REMOVED}checkpoint-*"):
        shutil.rmtree(folder)


def rotate_checkpoints(output_dir: Path, *, limit: int | None, best: str | None = None) -> None:
    """Remove the oldest complete checkpoints beyond `limit` (None keeps all); never the newest nor the best.

    transformers does so before the new one is complete, and file by file: killed in between, nothing might be left.
    """
    if not limit or limit < 1:
        return
    complete = [folder for _, folder in list_checkpoints(output_dir) if (folder / STATE_FILE).exists()]
    spare = [folder for folder in complete[:-1] if best is None or folder.resolve() != Path(best).resolve()]
    for folder in spare[: max(0, len(complete) - limit)]:
        _remove(folder)


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """List (step, folder) of all that are named as checkpoints, whole or not, oldest first."""
    found = [(match, path) for path in output_dir.glob("checkpoint-*") if (match := _FOLDER.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found if path.is_dir())


def read_step(folder: Path) -> int:
    """Read the number of optimizer steps behind a complete checkpoint."""
    return int(_read_state(folder)["step"])


def read_settings(folder: Path) -> Mapping[str, Any]:
    """Read the settings of a complete checkpoint that the order of tasks hangs on."""
    settings: Mapping[str, Any] = _read_state(folder)["settings"]
    return settings


def require_same_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where a setting that the order of tasks hangs on has changed."""
    for name, value in now.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"{name} is {value!r} and was {saved.get(name)!r} when the checkpoint was written; a run goes on only "
                "with the same tasks in the same order. Set it back, or begin a new run with the checkpoint as model"
            )


def wants_newest(wanted: str | bool | None) -> bool:
    """Return whether `resume_from_checkpoint` is "auto" or True."""
    return _parse_wanted(wanted) is True


def _parse_wanted(wanted: str | bool | None) -> str | bool:
    """True, a path, or False."""
    named = {"auto": True, "true": True, "": False, "false": False, "none": False, "null": False}
    return named.get(wanted.lower(), wanted) if isinstance(wanted, str) else bool(wanted)


def _without_caches(passed: dict[str, Any]) -> dict[str, Any]:
    """Copy a forward pass without the caches that its layout got on the way."""
    packed = passed["packed"]
    return {**passed, "packed": replace(packed, layout=replace(packed.layout))}


def _remove(folder: Path) -> None:
    """Remove a folder, by a rename first: removed in part it must not look like a checkpoint."""
    gone = folder.with_name(_REMOVED + folder.name)
    if gone.exists():
        shutil.rmtree(gone)
    folder.replace(gone)
    shutil.rmtree(gone)


def _flush(path: Path) -> None:
    """Have the disk hold what was written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
