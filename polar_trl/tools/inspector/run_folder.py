"""Answer the pages' questions about the folder of a run, an evaluation or a collection.

Each part is computed again only when its files have changed; nothing is ever written.
"""

import json
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from polar_trl.errors import ConfigError, RecordError
from polar_trl.grpo.logs.reasons_file import REASONS_FILE, summarize_reasons
from polar_trl.run_folder import LOG_FILE, SETTINGS_FILE, SUMMARY_FILE
from polar_trl.sandbox.owner import is_dead, is_running
from polar_trl.tools.inspector.curves import Curves
from polar_trl.tools.inspector.figures import build_figures, build_pass_rates
from polar_trl.tools.inspector.sessions import QUIET_S, Entry, SessionIndex, is_alive, is_beginning
from polar_trl.tools.inspector.table import build_table_row, build_table_rows, count_choices
from polar_trl.tools.inspector.task_map import build_task_maps
from polar_trl.tools.inspector.trained_rows import TrainedRowIndex
from polar_trl.tools.inspector.view import SessionView
from polar_trl.tools.inspector.vocabulary import Vocabulary, load_vocabulary

RESULTS_FILE = "results.jsonl"
KEPT_VIEWS = 3
"""Sessions that stay open in memory; one of 200 calls of 100,000 tokens takes some tens of megabytes."""


class RunFolder:
    """One run's sessions, trained rows, curves and settings. Threads may share it.

    Args:
        folder: RUN.
        tokenizer: Folder or hub id; None takes the model that the run's settings name.
        prefix: Of the keys of its sessions, where pages show several runs.

    Raises `ConfigError` for a folder that holds no run, and for a tokenizer that is not there.
    """

    def __init__(self, folder: Path, tokenizer: str | None = None, *, prefix: str = "") -> None:
        _check_folder(folder)
        self.folder = folder
        self.prefix = prefix
        self.settings, self.settings_problem = _read_settings(folder / SETTINGS_FILE)
        name = self.settings.get("tokenizer", self.settings.get("model"))  # an evaluation knows its model by a digest
        self.vocabulary: Vocabulary = load_vocabulary(
            name if isinstance(name, str) else None, flag=tokenizer, unnamed=self.settings_problem
        )
        self.sessions = SessionIndex(folder / "sessions")
        self.rows = TrainedRowIndex(folder / "rows")
        self.curves = Curves(folder)
        self._lock = threading.Lock()
        self._views: OrderedDict[tuple[Any, ...], SessionView] = OrderedDict()
        self._table: tuple[tuple[int, int, int], list[dict[str, Any]]] | None = None
        self._reasons: tuple[float, dict[str, Any]] | None = None

    def build_run(self) -> dict[str, Any]:
        """Build the JSON of the run as a whole, with the versions of its parts."""
        lines = self.curves.refresh()
        rows = self.build_table()
        max_steps = self.settings.get("max_steps")
        return {
            "name": self.folder.resolve().name,
            "folder": str(self.folder),
            "agent": self.agent,
            "model": _shorten(self.settings.get("model")),
            "settings": self._describe_settings(),
            "figures": build_figures(lines, rows),
            "lessons": self._summarize_reasons(),
            "has_curves": bool(lines) or not self.is_evaluation,
            "is_evaluation": self.is_evaluation,
            "is_live": self.is_live(),
            "step": max((int(line["step"]) for line in lines), default=None),
            "max_steps": max_steps if isinstance(max_steps, int) and max_steps > 0 else None,
            "curves_version": self.curves.version,
            "sessions_version": f"{self.sessions.version}.{self.rows.version}",
            "num_sessions": len(rows),
            "choices": count_choices(rows),
            "vocabulary": {"known": self.vocabulary.is_known, "note": self.vocabulary.note},
            "bad_row_lines": self.rows.num_bad_lines,
            "settings_problem": self.settings_problem,
        }

    @property
    def agent(self) -> str | None:
        """Name of the agent, where the settings have it."""
        name = self.settings.get("agent")
        return name if isinstance(name, str) else None

    @property
    def is_evaluation(self) -> bool:
        """Tell whether the folder is an evaluation's (or a collection's), and no training run's."""
        return (self.folder / RESULTS_FILE).exists()

    def build_tasks(self) -> dict[str, Any]:
        """Build the JSON of tasks: maps by step, and an evaluation's pass rates. Raises `RecordError`."""
        return {**build_task_maps(self.build_table()), **build_pass_rates(self.folder)}

    def build_table(self) -> list[dict[str, Any]]:
        """Build a row per session, again when something has changed, or a stage may have by time alone."""
        entries = self.sessions.refresh()
        self.rows.refresh()
        state = (self.sessions.version, self.rows.version, int(time.time() // 30))
        with self._lock:
            if self._table is None or self._table[0] != state:
                table = build_table_rows(entries, self.rows, self.agent)
                self._table = (
                    state,
                    [row | {"key": self.prefix + row["key"]} for row in table] if self.prefix else table,
                )
            return self._table[1]

    def is_live(self) -> bool:
        """Tell whether the run seems to go on, by files written after its last summary, as runs are continued."""
        lines, limit, now_s = self.curves.refresh(), self.settings.get("max_steps"), time.time()
        summary_s = _find_change(self.folder / SUMMARY_FILE)
        later = [entry for entry in self.sessions.refresh() if entry.changed_s > summary_s]
        if any(is_alive(entry, now_s) for entry in later):
            return True
        if lines and isinstance(limit, int) and lines[-1]["step"] >= limit > 0:
            return False
        owners = {entry.owner for entry in later if entry.owner}
        if any(map(is_running, owners)):
            return True
        if owners and all(map(is_dead, owners)):
            return False
        files = [_find_change(self.folder / name) for name in (LOG_FILE, RESULTS_FILE)]
        newest_s = max([*files, *(entry.changed_s for entry in later)])
        return newest_s > summary_s and now_s - newest_s < QUIET_S

    def build_session(self, key: str) -> dict[str, Any]:
        """Build the JSON of one session's page. Raises `KeyError`, and `RecordError` for an unreadable file."""
        key = key.removeprefix(self.prefix)
        entry = self.find_entry(key)
        view = self.open_session(key)
        rows = self.build_table()
        group = [
            {"key": row["key"], "rollout": row["rollout"], "reward": row["reward"]}
            for row in rows
            if entry.group and (row["group"], row["attempt"]) == (entry.group, entry.attempt)
        ]
        row = build_table_row(entry, self.rows, self.agent, time.time())
        row["key"] = self.prefix + row["key"]
        num_rows = self.rows.count_rows(key)
        return {"row": row, "group": group, "size": entry.size, "num_rows": num_rows, **view.build_meta()}

    def _summarize_reasons(self) -> dict[str, Any]:
        """Summarize `reasons.jsonl`, again when it has changed: which steps taught nothing, why, and what to try."""
        changed_s = _find_change(self.folder / REASONS_FILE)
        with self._lock:
            if self._reasons is None or self._reasons[0] != changed_s:
                self._reasons = changed_s, summarize_reasons(self.folder)
            return self._reasons[1]

    def _describe_settings(self) -> dict[str, Any]:
        """Return the settings that the page lists: single values, and of the newest start what is in its groups."""
        shown = {name: value for name, value in self.settings.items() if not isinstance(value, dict | list)}
        starts = self.settings.get("starts")
        if not isinstance(starts, list) or not starts or not isinstance(starts[-1], dict):
            return shown
        shown["starts"] = len(starts)
        for name, value in starts[-1].items():
            if isinstance(value, dict):
                shown |= {f"{name}: {key}": json.dumps(item, ensure_ascii=False) for key, item in value.items()}
            else:
                shown[name] = value
        return shown

    def find_entry(self, key: str) -> Entry:
        """Find a session by its key. Raises `KeyError`."""
        entry = self.sessions.get(key)
        if entry is None:
            self.sessions.refresh()
            entry = self.sessions.get(key)
        if entry is None:
            raise KeyError(key)
        return entry

    def open_session(self, key: str) -> SessionView:
        """Open the session as it is now, and keep it open for the questions that follow. Raises `RecordError`."""
        key = key.removeprefix(self.prefix)
        entry = self.find_entry(key)
        if is_beginning(entry):
            raise RecordError(f"{entry.path}: nothing is recorded yet; open the session again in a moment")
        outcome = self.rows.find_outcome(key)
        state = (key, entry.size, outcome, self.rows.count_rows(key))
        with self._lock:
            if state in self._views:
                self._views.move_to_end(state)
                return self._views[state]
        limit = self.settings.get("max_trajectory_tokens")
        view = SessionView(
            self.sessions.read(entry),
            outcome,
            self.rows.read_rows(key),
            self.vocabulary,
            limit if isinstance(limit, int) else None,
            chooses_turns=self.settings.get("train_turns", "all") != "all",
        )
        with self._lock:
            # of a session that grows, the former state is no longer asked for
            for old in [old for old in self._views if old[0] == key]:
                del self._views[old]
            self._views[state] = view
            while len(self._views) > KEPT_VIEWS:
                self._views.popitem(last=False)
        return view


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give the output_dir of a run, an evaluation or a collection")
    if not any((folder / name).exists() for name in ("sessions", LOG_FILE, RESULTS_FILE, SETTINGS_FILE)):
        raise ConfigError(
            f"{folder}: not a run's folder, which has sessions/, {LOG_FILE}, {RESULTS_FILE} or {SETTINGS_FILE}"
        )


def _find_change(path: Path) -> float:
    """Return a file's time of change, Unix seconds; 0 where there is no file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _shorten(model: Any) -> Any:
    """Shorten a model's folder to its name: the settings have the path."""
    return Path(model).name if isinstance(model, str) and Path(model).is_absolute() else model


def _read_settings(path: Path) -> tuple[dict[str, Any], str | None]:
    """Read the settings that the run wrote at its start, and the reason where they cannot be read."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path} cannot be read ({error})"
    return (settings, None) if isinstance(settings, dict) else ({}, f"{path} cannot be read (it holds no JSON object)")
