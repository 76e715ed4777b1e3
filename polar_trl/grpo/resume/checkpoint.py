"""Write and read checkpoint folders from which a run goes on exactly, and find the newest such folder of a run.

The trainer of transformers writes a checkpoint file by file, and a kill can come between any two. What this module
adds is written last: `polar_state.json`, by a rename, with the size of every other file. A file
`polar_state.json.part` lies there from the first moment on, so that a folder that was begun and not finished is told
apart from one that somebody else made. A folder is never used unless all of its files are there, and nothing is
removed that was not begun here.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.trainer_pt_utils import safe_globals

from polar_trl.errors import ConfigError
from polar_trl.grpo.packing.forward import PackedRows
from polar_trl.grpo.packing.layout import Layout, Segment
from polar_trl.run_folder import TRAINED_FILE

logger = logging.getLogger(__name__)

VERSION = 2
STATE_FILE = "polar_state.json"
PART_FILE = STATE_FILE + ".part"
RANK_FILE = "polar_rank{}.pt"
MASTERS_FILE = "polar_masters{}.safetensors"
_FOLDER = re.compile(r"checkpoint-(\d+)")
_REMOVED = "removed-"
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


# One folder.


def begin_checkpoint(folder: Path) -> None:
    """Mark the folder as one that is being written. One rank calls it, before any other writes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PART_FILE).touch()
    (folder / STATE_FILE).unlink(missing_ok=True)


def save_rank_state(folder: Path, rank: int, state: RankState) -> None:
    """Write one rank's unfinished work."""
    windows = [[_without_caches(passed) for passed in window] for window in state.windows]
    torch.save({"windows": windows, "open_task_ids": list(state.open_task_ids)}, folder / RANK_FILE.format(rank))


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
    sizes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != PART_FILE:
            sizes[str(path.relative_to(folder))] = path.stat().st_size
            _flush(path)
    part = folder / PART_FILE
    content = {"version": VERSION, "is_resumable": is_resumable, **asdict(state), "files": sizes}
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
    content = json.loads((folder / STATE_FILE).read_text())
    for name in ("version", "is_resumable", "files"):
        del content[name]
    path = folder / RANK_FILE.format(rank)
    if not path.is_file():
        raise ConfigError(f"resume_from_checkpoint: {folder} was written by fewer processes: {path.name} is missing")
    with safe_globals(), torch.serialization.safe_globals(_SAVED_TYPES):
        return RunState(**content), RankState(**torch.load(path, map_location=device, weights_only=True))


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
    content = json.loads((folder / STATE_FILE).read_text())
    if _is_of_other_version(folder):
        return f"has version {content['version']!r} of the format; this package reads version {VERSION}"
    if not content["is_resumable"]:
        return "was saved with save_only_model: it holds no optimizer"
    for name, size in content["files"].items():
        path = folder / name
        if not path.is_file():
            return f"lacks {name}"
        if path.stat().st_size != size:
            return f"has {name} with {path.stat().st_size} bytes, and it was written with {size}"
    return None


def _is_of_other_version(folder: Path) -> bool:
    path = folder / STATE_FILE
    return path.is_file() and json.loads(path.read_text())["version"] != VERSION


# The folders of a run.


def choose_checkpoint(output_dir: Path, wanted: str | bool | None) -> Path | None:
    """Choose the checkpoint that a run goes on from, by `resume_from_checkpoint`; None to begin.

    Args:
        wanted: "auto" or True: the newest complete one of `output_dir`, if any. A path: that one. None: begin.

    Raises:
        ConfigError: there is no such checkpoint, or `output_dir` has newer ones, which a later "auto" would take.
    """
    wanted = _parse_wanted(wanted)
    if wanted is True:
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
    folder = choose_checkpoint(output_dir, wanted)
    is_own = folder is not None and folder.resolve().parent == output_dir.resolve()
    held = [path.name for _, path in list_checkpoints(output_dir)]
    held += [name for name in ("sessions", TRAINED_FILE, "summary.json") if (output_dir / name).exists()]
    if held and not is_own and _parse_wanted(wanted) is not True:
        raise ConfigError(
            f"output_dir {output_dir} holds a run already ({held[0]}): go on with it by "
            "--resume_from_checkpoint auto, or name another output_dir"
        )
    return folder


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
    return int(json.loads((folder / STATE_FILE).read_text())["step"])


def require_same_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where a setting that the order of tasks hangs on has changed."""
    for name, value in now.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"{name} is {value!r} and was {saved.get(name)!r} when the checkpoint was written; a run goes on only "
                "with the same tasks in the same order. Set it back, or begin a new run with the checkpoint as model"
            )


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
