"""One session from a task to a rollout and its trajectories, and the stages that many sessions pass through.

This is the one module that knows every actor. It refuses to turn a failure of the world into a reward: what could
not be prepared, reached or graded has no reward, and says why.

A session is one thread and one plain function, `_Session.run`. Each stage (prepare, agent, grade) has its own
number of places and its own clock, so a slow grader holds no agent's place, and a stage that runs out of time
erases nothing that another stage produced.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from polar_trl.errors import LawError, PolarError
from polar_trl.grade.attempts import count_peeks
from polar_trl.grade.base import FreshSandboxGrader, Grader
from polar_trl.harness.base import Harness
from polar_trl.proxy import Proxy
from polar_trl.reconstruct.laws import check_laws
from polar_trl.reconstruct.merge import BUILDERS, Reconstruction, count_as_policy, digest
from polar_trl.record import SessionLog
from polar_trl.sandbox.base import ExecResult, Sandbox, SandboxBackend
from polar_trl.session import SessionLimits
from polar_trl.types import Rollout, StopReason, Task

logger = logging.getLogger(__name__)

STAGES = ("prepare", "agent", "grade")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """How many sessions may be in each stage, and how their calls become trajectories."""

    max_preparing: int = 4
    max_agents: int = 16
    max_grading: int = 4
    limits: SessionLimits = SessionLimits()
    builder: str = "prefix_merging"
    train_auxiliary: bool = False
    """Train what the agent asked beside its task (titles, summaries) like the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One rollout to make."""

    rollout_id: str
    group_id: str
    task: Task
    record_path: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A rollout and what can be trained of it (all of it, reward or not; the trainer decides)."""

    rollout: Rollout
    reconstruction: Reconstruction


class RolloutRunner:
    """Runs batches of sessions. One per process; `run` is called by one thread at a time.

    Args:
        proxy: A started proxy.
        grader: None where rewards come from elsewhere; the rollouts then have none of their own.
    """

    def __init__(
        self, *, proxy: Proxy, backend: SandboxBackend, harness: Harness, grader: Grader | None, config: RolloutConfig
    ) -> None:
        self.proxy = proxy
        self.backend = backend
        self.harness = harness
        self.grader = grader
        self.config = config
        self.places = {
            "prepare": threading.BoundedSemaphore(config.max_preparing),
            "agent": threading.BoundedSemaphore(config.max_agents),
            "grade": threading.BoundedSemaphore(config.max_grading),
        }

    def run(self, jobs: Sequence[Job], *, show_progress: bool = False) -> list[Finished]:
        """Run all jobs and return their results in order.

        Raises:
            LawError: a law is broken; every other session is stopped first.
            KeyboardInterrupt: every session is stopped and its sandbox removed first.
        """
        board = _Board(len(jobs), show=show_progress)
        sessions = [_Session(self, job, board) for job in jobs]
        executor = ThreadPoolExecutor(max_workers=max(1, len(jobs)), thread_name_prefix="polar-session")
        futures = [executor.submit(session.run) for session in sessions]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            return [future.result() for future in futures]
        finally:
            # Only an exception leaves sessions running here. Killed until they end: a command may be about to start.
            while wait(futures, timeout=0).not_done:
                for session in sessions:
                    session.cancel()
                wait(futures, timeout=0.2)
            executor.shutdown()
            board.close()


class _Session:
    """One job on its way through the stages."""

    def __init__(self, runner: RolloutRunner, job: Job, board: "_Board") -> None:
        self._runner = runner
        self._job = job
        self._board = board
        self._log = SessionLog(
            session_id=job.rollout_id, task_id=job.task.id, group_id=job.group_id, path=job.record_path
        )
        self._sandbox: Sandbox | None = None
        self._cancelled = threading.Event()
        self._grading_is_ordered = False
        self._seconds: dict[str, float] = dict.fromkeys(("queue", *STAGES), 0.0)

    def cancel(self) -> None:
        """Have the session end soon, whatever it is doing. From any thread."""
        self._cancelled.set()
        if self._sandbox is not None:
            self._sandbox.kill()

    def run(self) -> Finished:
        """Prepare, run the agent, grade, and rebuild trajectories. Failures of the world end up in the rollout."""
        stop_reason: StopReason = "prepare_failed"
        reward = error = None
        try:
            self._sandbox = self._prepare()
            self._order_grading()
            stop_reason = "agent_failed"
            stop_reason, error = self._run_agent(self._sandbox)
            if error is None:
                reward, error = self._grade(self._sandbox)
        except _Cancelled:
            stop_reason, error = "cancelled", "the run was stopped"
        except LawError:
            raise
        except (PolarError, OSError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        finally:
            self._withdraw_grading()
            self._destroy_sandbox()
        if peeks := count_peeks(self._log.calls, self._job.task):
            self._log.count("peeks", peeks)
            self._log.count("rollouts_that_peeked")
        rollout = Rollout(
            id=self._job.rollout_id,
            task_id=self._job.task.id,
            group_id=self._job.group_id,
            calls=self._log.calls,
            stop_reason=stop_reason,
            reward=reward,
            error=error,
            seconds=self._seconds,
            counters=self._log.counters,
        )
        if error is not None:
            logger.warning("rollout %s has no reward: %s", rollout.id, error)
        reconstruction = self._reconstruct(rollout)
        self._board.finish()
        return Finished(rollout=rollout, reconstruction=reconstruction)

    def _reconstruct(self, rollout: Rollout) -> Reconstruction:
        """Rebuild the trajectories, check the laws, and close the record with what is needed to check them again."""
        config = self._runner.config
        trained = count_as_policy(rollout) if config.train_auxiliary else rollout
        reconstruction = BUILDERS[config.builder](trained)
        check_laws(trained, reconstruction)
        extra = {
            "trajectory_digest": digest(reconstruction.trajectories),
            "builder": config.builder,
            "train_auxiliary": config.train_auxiliary,
        }
        self._log.close(rollout, extra)
        return reconstruction

    def _destroy_sandbox(self) -> None:
        if self._sandbox is None:
            return
        try:
            self._sandbox.destroy()
        except (PolarError, OSError) as failure:
            # what the session produced is not worth less for it
            self._log.count("sandboxes_left_behind")
            logger.warning("rollout %s: its sandbox could not be removed: %s", self._job.rollout_id, failure)

    def _prepare(self) -> Sandbox:
        with self._stage("prepare"):
            return self._runner.backend.create(self._job.task, self._job.rollout_id)

    def _order_grading(self) -> None:
        grader = self._runner.grader
        if isinstance(grader, FreshSandboxGrader):
            grader.order(self._job.task)
            self._grading_is_ordered = True

    def _withdraw_grading(self) -> None:
        grader = self._runner.grader
        if self._grading_is_ordered and isinstance(grader, FreshSandboxGrader):
            grader.withdraw(self._job.task)

    def _run_agent(self, sandbox: Sandbox) -> tuple[StopReason, str | None]:
        """Why the agent stopped, and the error that makes a reward meaningless, if there is one."""
        runner, task = self._runner, self._job.task
        with self._stage("agent"):
            endpoint = runner.proxy.open_session(
                self._log, runner.config.limits, runner.harness.classify, sandbox.open_listener()
            )
            try:
                launch = runner.harness.build_launch(task, endpoint)
                for path, text in launch.files.items():
                    sandbox.put(f"~/{path}", text.encode())
                env = {**task.env, **launch.env}
                result = sandbox.run(launch.command, env=env, timeout_s=task.agent_timeout_s)
            finally:
                runner.proxy.close_session(endpoint.api_key)
        self._raise_if_cancelled()
        if result.out_of_memory:
            self._log.count("agent_out_of_memory")
        if result.disk_full:
            self._log.count("agent_disk_full")
        sampled = sum(len(call.completion.token_ids) for call in self._log.calls)
        if faults := self._log.counters.get("internal_errors", 0) + self._log.counters.get("engine_errors", 0):
            return "agent_failed", f"{faults} model calls failed on our side; the agent's result says nothing"
        if sampled == 0:
            counts = ", ".join(f"{name}: {count}" for name, count in self._log.counters.items())
            return "no_calls", f"the agent got no answer of the model ({counts or _describe_exit(result)})"
        if result.timed_out:
            return "agent_timeout", None
        return ("completed" if runner.harness.judge_exit(result, self._log.calls) else "agent_failed"), None

    def _grade(self, sandbox: Sandbox) -> tuple[float | None, str | None]:
        grader = self._runner.grader
        if grader is None:
            return None, None
        with self._stage("grade"):
            self._grading_is_ordered = False  # from here on it is the grader's own affair
            try:
                grade = grader.grade(self._job.task, sandbox, timeout_s=self._job.task.grade_timeout_s)
                reward = float(grade.reward)
                for name, count in grade.counters.items():
                    self._log.count(name, count)
                return (reward, None) if math.isfinite(reward) else (None, f"the grader gave {reward}")
            except Exception as failure:  # noqa: BLE001 - the grader's one boundary: a grader that fails is no zero
                self._raise_if_cancelled()
                return None, f"the grader failed: {type(failure).__name__}: {failure}"

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Wait for a place in a stage, then run its clock."""
        asked = time.monotonic()
        with self._runner.places[name]:
            started = time.monotonic()
            self._seconds["queue"] += started - asked
            self._raise_if_cancelled()
            self._board.enter(name)
            try:
                yield
            finally:
                self._seconds[name] = time.monotonic() - started
                self._board.leave(name)

    def _raise_if_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise _Cancelled


class _Cancelled(Exception):
    """The run is being stopped."""


class _Board:
    """The progress bar: sessions by stage."""

    def __init__(self, total: int, *, show: bool) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._bar = tqdm(total=total, desc="rollouts", unit="session", leave=False, disable=not show)

    def enter(self, stage: str) -> None:
        self._change(stage, +1)

    def leave(self, stage: str) -> None:
        self._change(stage, -1)

    def finish(self) -> None:
        with self._lock:
            self._bar.update(1)

    def close(self) -> None:
        self._bar.close()

    def _change(self, stage: str, by: int) -> None:
        with self._lock:
            self._counts[stage] += by
            self._bar.set_postfix({name: self._counts[name] for name in STAGES}, refresh=False)
            self._bar.update(0)


def _describe_exit(result: ExecResult) -> str:
    """How the agent ended, with the end of what it printed."""
    how = "stopped at its time limit" if result.timed_out else f"exit code {result.exit_code}"
    said = (result.stderr.strip() or result.stdout.strip())[-300:]
    return f"{how}; it printed: {said!r}" if said else f"{how}; it printed nothing"
