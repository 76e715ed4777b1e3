"""Serve a checkpoint to the agents of this machine, with somebody in front of them, and record their sessions.

    OUT/settings.json             what is served
    OUT/sessions/START/NAME.jsonl the records (`polar_trl.recording.log`), a folder per start

The key opens the session "default" of this start, and KEY.NAME one of its own, with the first request that has it. All
of them get their end when serving ends. Nothing is graded.
"""

import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polar_trl.errors import ConfigError, LawError
from polar_trl.eval.open_model import open_engine, open_proxy, prepare_model
from polar_trl.eval.sample_tasks import read_settings
from polar_trl.eval.setup import EvalSetup, find_checkpoint
from polar_trl.grpo.resume.model_folder import Checkpoint
from polar_trl.proxy import NewSession, listen
from polar_trl.reconstruct import build_prefix_merged, check_laws, count_calls, digest
from polar_trl.recording.log import SessionLog
from polar_trl.recording.session import Classify, SessionLimits, always_policy
from polar_trl.run_folder import LOCK_FILE, SETTINGS_FILE, FolderLock, disk_errors, make_output_dir, write_whole
from polar_trl.sandbox.owner import build_owner_tag
from polar_trl.setup.agents import build_harness
from polar_trl.types import Endpoint, Rollout

DEFAULT_SESSION = "default"
COMMAND = "serve"
MAX_CALLS = 100_000
"""Of a session: a person, and not a budget, says when it ends."""
_TROUBLES = ("context_overflows", "calls_aborted", "calls_sent_back", "engine_errors", "internal_errors")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
_KEY = re.compile(r"[\w-]{8,128}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Where to serve, and under which key. Raises `ConfigError`."""

    host: str
    port: int
    """0 lets the system choose."""
    api_key: str = field(default_factory=lambda: f"polar-{secrets.token_hex(12)}", repr=False)

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.api_key):
            raise ConfigError("--key must have 8 to 128 letters, digits, - and _; leave it out for a random one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """What the sessions of a start have come to."""

    sessions: int
    calls: int
    sampled_tokens: int
    tokens_per_s: float | None
    """Of the call that ended last, its wait for the engine included; None where none has."""
    troubles: Mapping[str, int]
    """Counters of calls that had no answer."""


class ServedSessions:
    """The sessions of one start: begun by their keys, ended together.

    Args:
        folder: Of the records; made with the first of them.
        api_key: Without a name.
        classify: Tells an agent's side requests from the others.
    """

    def __init__(self, folder: Path, api_key: str, *, classify: Classify) -> None:
        self.folder = folder
        self._api_key = api_key
        self._classify = classify
        self._logs: dict[str, SessionLog] = {}
        self._has_ended = False

    @property
    def logs(self) -> tuple[SessionLog, ...]:
        """The records so far. From any thread."""
        return tuple(self._logs.values())

    def begin(self, api_key: str) -> NewSession | None:
        """Begin the session of a key that was not seen before; None where it is no key of ours."""
        name = self._read_name(api_key)
        if self._has_ended or name is None:
            return None
        log = self._logs[name] = SessionLog(
            session_id=name,
            task_id=name,
            group_id=name,
            path=self.folder / f"{name}.jsonl",
            owner=build_owner_tag(),
        )
        return log, SessionLimits(max_calls=MAX_CALLS), self._classify

    def count(self) -> Totals:
        """Count what is on record so far. From any thread."""
        logs = self.logs
        calls = [call for log in logs for call in log.calls]
        answered = [call for call in calls if call.completion.token_ids and call.duration_s > 0]
        last = max(answered, key=lambda call: call.started_s + call.duration_s, default=None)
        troubles = {name: sum(log.counters.get(name, 0) for log in logs) for name in _TROUBLES}
        by_server = sum(log.counters.get("tokens_by_server", 0) for log in logs)
        return Totals(
            sessions=len(logs),
            calls=len(calls),
            sampled_tokens=by_server + sum(len(call.completion.token_ids) for call in calls),
            tokens_per_s=None if last is None else len(last.completion.token_ids) / last.duration_s,
            troubles={name: count for name, count in troubles.items() if count},
        )

    def end(self) -> None:
        """Write the end of every record. Raises the first `LawError`, when all others have their end."""
        self._has_ended = True
        broken: list[LawError] = []
        for log in self.logs:
            try:
                self._end_one(log)
            except LawError as error:
                broken.append(error)
        if broken:
            raise broken[0]

    def _read_name(self, api_key: str) -> str | None:
        if secrets.compare_digest(api_key.encode(), self._api_key.encode()):
            return DEFAULT_SESSION
        key, _, name = api_key.partition(".")
        is_ours = secrets.compare_digest(key.encode(), self._api_key.encode())
        return name if is_ours and _NAME.fullmatch(name) and name != DEFAULT_SESSION else None

    def _end_one(self, log: SessionLog) -> None:
        calls = log.calls
        first_s, last_s = (calls[0].started_s, calls[-1].started_s + calls[-1].duration_s) if calls else (0.0, 0.0)
        rollout = Rollout(
            id=log.session_id,
            task_id=log.session_id,
            group_id=log.session_id,
            calls=calls,
            stop_reason="completed" if any(call.is_answered for call in calls) else "no_calls",
            counters=log.counters,
            seconds={"agent": max(0.0, last_s - first_s)},
        )
        reconstruction = build_prefix_merged(rollout)
        if not any(call.text_only for call in log.calls):
            check_laws(rollout, reconstruction)
        extra = {
            "trajectory_digest": digest(reconstruction.trajectories),
            "builder": "prefix_merging",
            "summary": count_calls(rollout, reconstruction),
        }
        log.close(rollout, extra)


@contextmanager
def open_serving(setup: EvalSetup, options: ServeOptions) -> Iterator[tuple[Endpoint, ServedSessions]]:
    """Load the model and serve it until the end of the block, which also ends the records.

    Raises:
        ConfigError: a model, a server, an address or a folder that cannot be used.
    """
    if setup.evaluation.solutions:
        raise ConfigError("solutions plays the solutions of tasks, and serve has none; leave it out")
    listen(options.host, options.port).close()  # before a model is loaded for minutes
    run, folder = setup.run, setup.folder
    classify = always_policy if run.agent == "shell" and not run.agent_command else build_harness(run).classify
    checkpoint = find_checkpoint(setup)
    start = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    with disk_errors(folder), open_records(folder, build_settings(setup, checkpoint)):
        model = prepare_model(setup, checkpoint)
        with open_engine(setup, model) as engine:
            sessions = ServedSessions(folder / "sessions" / start, options.api_key, classify=classify)
            try:
                with open_proxy(
                    setup.args,
                    engine,
                    model=model,
                    params=setup.params,
                    host=options.host,
                    port=options.port,
                    live=True,
                    begin_session=sessions.begin,
                ) as proxy:
                    yield proxy.describe(options.api_key), sessions
            finally:
                sessions.end()


def build_settings(setup: EvalSetup, checkpoint: Checkpoint) -> dict[str, Any]:
    """Build what a folder of records says of its model (JSON values)."""
    name = checkpoint.base or checkpoint.name
    args, params = setup.args, setup.params
    return {
        "command": COMMAND,
        "model": checkpoint.identity,
        "tokenizer": os.path.abspath(name) if Path(name).is_dir() else name,
        "agent": None if setup.run.agent == "shell" else setup.run.agent,
        "base_url": setup.evaluation.base_url,
        **{name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "max_tokens")},
        **{name: getattr(args, name) for name in ("vllm_max_model_length", "renderer", "thinking")},
        "chat_template_kwargs": args.chat_template_kwargs,
    }


@contextmanager
def open_records(folder: Path, settings: Mapping[str, Any]) -> Iterator[None]:
    """Lock a folder for the block: new, empty, or of an earlier start with the same model. Raises `ConfigError`."""
    make_output_dir(folder)
    with FolderLock(folder):
        before = read_settings(folder)
        there = sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK_FILE)
        if there and before.get("command") != COMMAND:
            raise ConfigError(
                f"output_dir {folder} holds {there[0]}: it is the folder of something else; name another output_dir"
            )
        if before and (folder / "sessions").exists() and before["model"] != settings["model"]:
            raise ConfigError(
                f"output_dir {folder} holds sessions of another model ({before['model']}); name another output_dir"
            )
        write_whole(folder / SETTINGS_FILE, (json.dumps(settings, indent=1, sort_keys=True) + "\n").encode())
        yield
