"""Run sessions for NeMo Gym's agent server (examples/nemo_gym), which asks for one by POST /run with a row.

The answer is that of the resources server's `/verify`: the row, the `response`, the `reward` and fields of its own. A
session without a reward answers with the row, the `response`, reward 0.0 and `_ng_failure_class`, by which Gym writes
it into its file of failures, and an `error`. Records are kept as `polar-trl serve` keeps them.
"""

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polar_trl.errors import ConfigError, TaskError
from polar_trl.eval.evaluate import open_runner
from polar_trl.eval.serve import build_settings, open_records
from polar_trl.eval.served_model import open_served_model
from polar_trl.eval.setup import EvalSetup, build_eval_parts, find_checkpoint
from polar_trl.grade.gym import GymGrader, build_response
from polar_trl.proxy import listen
from polar_trl.rollout.runner import Job, RolloutRunner
from polar_trl.run_folder import disk_errors
from polar_trl.setup.run_setup import limit_times
from polar_trl.tasks.gym import read_row
from polar_trl.types import Call, Task


class _KeptAnswers(GymGrader):
    """Keeps what `/verify` answered, by the session's id, until it is sent on."""

    def __init__(self, head: str) -> None:
        super().__init__(head)
        self.answers: dict[str, dict[str, Any]] = {}

    def verify(self, task: Task, calls: Sequence[Call], *, timeout_s: float) -> dict[str, Any]:
        """See `GymGrader`. A session that is graded has calls."""
        answer = super().verify(task, calls, timeout_s=timeout_s)
        self.answers[calls[0].session_id] = answer
        return answer


class GymSessions:
    """Runs one session per row. Any number of threads call it."""

    def __init__(self, setup: EvalSetup, runner: RolloutRunner, grader: _KeptAnswers, folder: Path) -> None:
        self._setup = setup
        self._runner = runner
        self._grader = grader
        self._folder = folder

    def run(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Run a session and return what Gym is answered. Raises as `RolloutRunner.run_one`."""
        name = f"task-{row.get('_ng_task_index', 'x')}-{row.get('_ng_rollout_index', 'x')}-{secrets.token_hex(3)}"
        try:
            (task,) = limit_times(self._setup.run, [read_row(row, name, name)])
        except TaskError as error:
            refused = {"_ng_failure_class": "row_refused", "_ng_failure_terminal": True, "error": str(error)}
            return {**row, "response": build_response(row, ()), "reward": 0.0, **refused}
        job = Job(rollout_id=name, group_id=name, task=task, record_path=self._folder / f"{name}.jsonl")
        rollout = self._runner.run_one(job).rollout
        answer = self._grader.answers.pop(name, None)
        if rollout.reward is not None and answer is not None:
            return answer
        failed = {"_ng_failure_class": rollout.error_kind, "error": rollout.error}
        return {**row, "response": build_response(row, rollout.calls), "reward": 0.0, **failed}


def serve_sessions(setup: EvalSetup, announce: Callable[[str], None], wait_for_end: Callable[[], None]) -> None:
    """Serve POST /run on a free port of 127.0.0.1 until `wait_for_end` returns, or a signal comes.

    Args:
        setup: With Gym's model server as `base_url`, its name as `served_name`, and Gym's head server as `grader`.
        announce: Gets the address once rows are taken.
        wait_for_end: Called on a thread of its own.

    Raises:
        ConfigError: a setting, a server or a folder that cannot be used.
        LawError, DiskError: of a session; ends serving.
    """
    run, evaluation = setup.run, setup.evaluation
    if evaluation.base_url is None or run.grader is None or not run.grader.startswith("http"):
        raise ConfigError("give Gym's model server as base_url, and its head server as grader (docs/nemo-gym.md)")
    folder = setup.folder / "sessions" / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    config = setup.args.build_rollout_config()
    pool = ThreadPoolExecutor(config.max_agents + config.max_preparing + config.max_grading)
    grader = _KeptAnswers(run.grader)
    parts = replace(build_eval_parts(setup, ()), grader=grader)
    try:
        with (
            disk_errors(setup.folder),
            open_records(setup.folder, build_settings(setup, find_checkpoint(setup))),
            open_served_model(
                evaluation.base_url, setup.args, setup.params, model=None, served_name=evaluation.served_name
            ) as engine,
            open_runner(setup.args, parts, engine, model="", params=setup.params) as runner,
        ):
            try:
                _serve(GymSessions(setup, runner, grader, folder), pool, announce, wait_for_end)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
    finally:
        parts.backend.close()


def _serve(
    sessions: GymSessions, pool: ThreadPoolExecutor, announce: Callable[[str], None], wait_for_end: Callable[[], None]
) -> None:
    failures: list[BaseException] = []

    async def post_run(request: Request) -> Response:
        try:
            row = await request.json()
        except ValueError:
            row = None
        if not isinstance(row, dict):
            return Response("a row is a JSON object", status_code=400)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(pool, sessions.run, row)
        except Exception as failure:
            failures.append(failure)
            server.should_exit = True
            raise
        return Response(json.dumps(answer), media_type="application/json")

    def end() -> None:
        wait_for_end()
        server.should_exit = True

    app = Starlette(routes=[Route("/run", post_run, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
    with listen("127.0.0.1", 0) as listener:
        announce(f"http://127.0.0.1:{listener.getsockname()[1]}")
        threading.Thread(target=end, name="polar-gym-end", daemon=True).start()
        server.run(sockets=[listener])
    if failures:
        raise failures[0]
