"""Run one session from a task to a graded rollout and its trajectories.

A session is one thread and one plain function, `SessionRun.run`. Each stage (prepare, agent, grade) has its own number
of slots and its own clock, so a slow grader holds no agent's slot, and a stage that runs out of time erases nothing
that another stage produced. The agent's clock stands still while a call of it is held at the proxy's gate, and while
this process is stopped.

A failure of the infrastructure is no reward of 0: the rollout then has none, and an `error_kind` and `error` instead.
"""

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from polar_trl.engine.gate import GateStats
from polar_trl.errors import GradeError, LawError, NotFiniteRewardError, PolarError, WorkerLostError
from polar_trl.grade.base import Grader, is_finite_reward, read_call_rewards
from polar_trl.grade.diff import render_session_changes
from polar_trl.grade.reward_hacking import count_solution_lookups
from polar_trl.harness.base import Harness
from polar_trl.harness.mixed import list_agents
from polar_trl.proxy import Proxy
from polar_trl.reconstruct.laws import check_laws
from polar_trl.reconstruct.merge import BUILDERS, Reconstruction, count_as_policy, count_calls, digest
from polar_trl.recording.log import SessionLog
from polar_trl.recording.session import SessionLimits
from polar_trl.rollout.ending import Redaction, describe_exit, ended_before_first_call, name_exit, to_one_line
from polar_trl.rollout.heartbeat import Heartbeat
from polar_trl.rollout.progress import StageProgress
from polar_trl.rollout.reasons import Repeats, find_reason, mask_numbers
from polar_trl.rollout.stragglers import StragglerCut
from polar_trl.run_folder import require_room
from polar_trl.sandbox.base import ExecResult, Sandbox, SandboxBackend
from polar_trl.sandbox.owner import build_owner_tag
from polar_trl.types import AgentExit, ErrorKind, GradeReport, Rollout, StopReason, Task
from polar_trl.user_code import describe_error, format_trace

logger = logging.getLogger(__name__)

STAGES = ("prepare", "agent", "grade")
BUILDER = "prefix_merging"
"""Key of `BUILDERS`: how a session becomes rows. scripts/gpu/per_request.py changes it."""
CLOCK_POLL_INTERVAL_S = 0.25
"""The longest between two looks at an agent's clock: it may have stood still, or a straggler's time may be up."""
MAX_AGENT_WALL_S = 7 * 86400.0
"""The sandbox's own deadline of an agent, whose clock is kept here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One rollout to make."""

    rollout_id: str
    group_id: str
    task: Task
    agent: str | None = None
    """Which of the run's agents plays it; None where there is one."""
    record_path: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutResult:
    """A rollout and the trajectories rebuilt from it. The trainer decides which of them it trains."""

    rollout: Rollout
    reconstruction: Reconstruction
    record_path: Path | None = None
    """Where the session is on disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerContext:
    """Services and settings that all sessions of a runner share."""

    proxy: Proxy
    backend: SandboxBackend
    harness: Harness
    grader: Grader | None
    limits: SessionLimits
    train_auxiliary: bool
    retry_lost_sessions: bool
    stage_slots: Mapping[str, threading.BoundedSemaphore]
    progress: StageProgress
    on_agent_end: Callable[[Job], None]
    """Called once a session's agent has ended and another one may run."""
    repeats: Repeats = field(default_factory=Repeats)
    """Of the failures that the log has."""


class SessionRun:
    """One job on its way through the stages.

    Args:
        context: Services and settings of its runner.
        job: Its own; a file is begun at `job.record_path`.
        cut: Says how long agents of its batch may run, and hears how long this one did.
        queue_s: For how long the job has waited for a place (s).
    """

    def __init__(self, context: RunnerContext, job: Job, cut: StragglerCut, *, queue_s: float = 0.0) -> None:
        self.job = job
        self.gate_stats = GateStats()
        self._context = context
        agents = list_agents(context.harness)
        self._agent = job.agent or next(iter(agents))
        self._harness = agents[self._agent]
        self._cut = cut
        self._log = SessionLog(
            session_id=job.rollout_id,
            task_id=job.task.id,
            group_id=job.group_id,
            path=job.record_path,
            owner=build_owner_tag(),
        )
        self._sandbox: Sandbox | None = None
        self._cancelled = threading.Event()
        self._grading_is_ordered = False
        self._redaction = Redaction()
        self._agent_exit: AgentExit | None = None
        self._grading: GradeReport | None = None
        self._changes: str | None = None
        self._call_rewards: Mapping[int, float] | None = None
        self._seconds: dict[str, float] = dict.fromkeys(("queue", *STAGES, "held"), 0.0) | {"queue": queue_s}

    def begin_again(self, ended: RolloutResult) -> "SessionRun | None":
        """Return a session of the same job, where this one's node was lost and that is to be retried."""
        if ended.rollout.stop_reason != "worker_lost" or not self._context.retry_lost_sessions:
            return None
        if (record := self.job.record_path) is not None:
            record.rename(f"{record}.lost")  # to be looked at, and no record of the run
        again = SessionRun(self._context, self.job, self._cut, queue_s=self._seconds["queue"])
        again._log.count("retried_after_loss")
        return again

    def cancel(self) -> None:
        """End the session soon, whatever it is doing. From any thread."""
        self._cancelled.set()
        if self._sandbox is not None:
            self._sandbox.kill()
        else:
            self._context.backend.give_up()

    def run(self) -> RolloutResult:
        """Prepare, run the agent, grade, and rebuild trajectories.

        Failures of the infrastructure end up in the rollout. Raises `LawError` where a law of the design is broken,
        and `DiskError` where a disk of this machine is full: every other session would fail the same way.
        """
        stop_reason: StopReason = "prepare_failed"
        reward: float | None = None
        failure: _Failure | None = None
        try:
            self._sandbox = self._prepare()
            self._order_grading()
            stop_reason = "agent_failed"
            stop_reason, failure = self._run_agent(self._sandbox)
            self._cut.note(None if failure else self._seconds["agent"])
            self._context.on_agent_end(self.job)
            self._changes = self._redaction.clean(self._sandbox.call(render_session_changes, self.job.task.files))
            if failure is None:
                reward, failure = self._grade(self._sandbox)
                self._sandbox.require_whole()
        except _Cancelled:
            stop_reason, failure = "cancelled", _Failure("cancelled", "the run was stopped")
        except LawError:
            raise
        except WorkerLostError as error:
            stop_reason, reward, failure = "worker_lost", None, _Failure("worker_lost", str(error))
            self._log.count(f"lost_on_{error.node}")
            self._cut.note(None)
        except (PolarError, OSError) as error:
            kind: ErrorKind = "prepare_failed" if stop_reason == "prepare_failed" else "sandbox_failed"
            reward, failure = None, _Failure(kind, f"{type(error).__name__}: {error}")
            self._cut.note(None)
        finally:
            self._withdraw_grading()
            self._destroy_sandbox()
        if peeks := count_solution_lookups(self._log.calls, self.job.task):
            self._log.count("peeks", peeks)
            self._log.count("rollouts_that_peeked")
        rollout = self._build_rollout(stop_reason, reward, failure)
        if failure is not None and failure.kind != "cancelled":  # a run that is stopped says so itself, once
            self._report(rollout, failure)
            record = self.job.record_path
            require_room(Path(tempfile.gettempdir()), *(() if record is None else (record.parent,)))
        return RolloutResult(
            rollout=rollout, reconstruction=self._reconstruct(rollout), record_path=self.job.record_path
        )

    def _build_rollout(self, stop_reason: StopReason, reward: float | None, failure: "_Failure | None") -> Rollout:
        return Rollout(
            id=self.job.rollout_id,
            task_id=self.job.task.id,
            group_id=self.job.group_id,
            calls=self._log.calls,
            stop_reason=stop_reason,
            reward=reward,
            call_rewards=self._call_rewards if reward is not None else None,
            error=None if failure is None else self._redaction.clean(failure.error),
            error_kind=None if failure is None else failure.kind,
            seconds=self._seconds,
            counters=self._log.counters,
            agent=self._agent,
            agent_exit=self._agent_exit,
            grading=self._grading,
            changes=self._changes,
        )

    def _report(self, rollout: Rollout, failure: "_Failure") -> None:
        """Say why there is no reward: the first time, and as it goes on ever more rarely."""
        if count := self._context.repeats.note((failure.kind, mask_numbers(failure.error))):
            again = "" if count == 1 else f" ({count} sessions so far, for this reason)"
            logger.warning("rollout %s has no reward%s: %s", rollout.id, again, rollout.error)

    def _prepare(self) -> Sandbox:
        with self._stage("prepare"):
            return self._context.backend.create(self.job.task, self.job.rollout_id)

    def _order_grading(self) -> None:
        if self._context.grader is not None:
            self._context.grader.order(self.job.task)
            self._grading_is_ordered = True

    def _run_agent(self, sandbox: Sandbox) -> tuple[StopReason, "_Failure | None"]:
        """Run the agent; why it stopped, and the failure that makes a reward meaningless, if there is one."""
        context, task = self._context, self.job.task
        with self._stage("agent"):
            endpoint = context.proxy.open_session(
                self._log, context.limits, self._harness.classify, sandbox.open_listener(), self.gate_stats
            )
            try:
                launch = self._harness.build_launch(task, endpoint)
                env = {**task.env, **launch.env}
                self._redaction = Redaction(env, [endpoint.api_key])
                for path, text in launch.files.items():
                    sandbox.put(f"~/{path}", text.encode(), executable=path in launch.executables)
                with _Clock(sandbox, self._log, self.gate_stats, task.agent_timeout_s, self._cut) as clock:
                    result = sandbox.run(launch.command, env=env, timeout_s=MAX_AGENT_WALL_S)
                self._agent_exit = self._redaction.build_exit(result)
                sandbox.require_whole()
            finally:
                context.proxy.close_session(endpoint.api_key)
        self._seconds["held"] = self.gate_stats.held_s
        self._seconds["agent"] = max(self._seconds["agent"] - self._seconds["held"] - clock.pause_s, 0.0)
        self._raise_if_cancelled()
        return self._judge_agent(result, clock.stopped_as, clock.pause_s)

    def _judge_agent(
        self, result: ExecResult, stopped_as: StopReason | None, pause_s: float
    ) -> tuple[StopReason, "_Failure | None"]:
        """Say why the agent stopped, from how its command ended and what became of its calls.

        Args:
            pause_s: For how long this process was stopped meanwhile.
        """
        if result.out_of_memory:
            self._log.count("agent_out_of_memory")
        if result.disk_full:
            self._log.count("agent_disk_full")
        if faults := self._log.counters.get("internal_errors", 0) + self._log.counters.get("engine_errors", 0):
            why = f"{faults}, the last by {self._log.last_failure}"
            error = f"model calls failed on our side ({why}); the agent's result says nothing"
            return "agent_failed", _Failure("model_calls_failed", error)
        if waited := self._log.counters.get("calls_never_taken", 0):
            error = f"the model's server was too busy for {waited} of the agent's calls, and took none of them later"
            return "agent_failed", _Failure("engine_busy", error)
        refusal, refused = self._log.unanswered_refusal, None
        if refusal:
            error = f"a request of the agent was refused, and it asked for nothing more: {refusal}"
            refused = _Failure("request_refused", error)
        if not any(call.is_answered for call in self._log.calls):
            return "no_calls", refused or self._describe_no_calls(result, is_stopped=stopped_as is not None)
        if self._log.exceeded:
            return "limit_exceeded", None
        if refused:
            return stopped_as or "agent_failed", refused
        if stopped_as is not None:
            return stopped_as, None
        is_fine = self._harness.judge_exit(result, self._log.calls)
        if pause_s and not (is_fine and "calls_aborted" not in self._log.counters):
            # it may have lost patience with a call that nobody was there to answer
            return "agent_failed", _Failure("model_calls_failed", _describe_pause(pause_s, "the agent ran and failed"))
        return ("completed" if is_fine else "agent_failed"), None

    def _describe_no_calls(self, result: ExecResult, *, is_stopped: bool) -> "_Failure":
        agent_exit = self._redaction.build_exit(result)
        if not is_stopped and ended_before_first_call(agent_exit, self._log.counters):
            said = to_one_line(agent_exit.output_tail)[-300:]
            how = f"the agent ended with {name_exit(agent_exit)} before its first call"
            return _Failure("no_calls", f"{how}: {said}" if said else f"{how}, and printed nothing")
        counts = ", ".join(f"{name}: {count}" for name, count in self._log.counters.items())
        ended = describe_exit(agent_exit, is_stopped=is_stopped)
        why = f"{counts}; {ended}" if counts else ended
        last = f"; the last request was refused: {self._log.last_refusal}" if self._log.last_refusal else ""
        return _Failure("no_calls", f"the agent got no answer from the model ({why}){last}")

    def _grade(self, sandbox: Sandbox) -> tuple[float | None, "_Failure | None"]:
        grader = self._context.grader
        if grader is None:
            return None, None
        with self._stage("grade"), Heartbeat().looking() as heartbeat:
            self._grading_is_ordered = False  # from here on the grader takes it back itself
            try:
                grade = grader.grade_session(
                    self.job.task, sandbox, self._log.calls, timeout_s=self.job.task.grade_timeout_s
                )
                self._grading = self._redaction.clean_report(grade.report)
                if pause_s := heartbeat.look():  # the grader's clock went on
                    return None, _Failure("grader_failed", _describe_pause(pause_s, "the session was graded"))
                if not is_finite_reward(grade.reward):
                    self._log.count("rewards_not_finite")
                    return None, _Failure("grader_failed", f"the grader gave {grade.reward}")
                self._call_rewards = read_call_rewards(grade.call_rewards, self._log.num_calls) or None
                for name, count in grade.counters.items():
                    self._log.count(name, count)
                return float(grade.reward), None
            except WorkerLostError:
                raise
            except Exception as error:  # noqa: BLE001 - the grader's one boundary: a grader that fails is no zero
                self._raise_if_cancelled()
                if isinstance(error, NotFiniteRewardError):
                    self._log.count("rewards_not_finite")
                if isinstance(error, GradeError):
                    why, said = str(error), error.output
                else:
                    why, said = describe_error(error), format_trace(error)
                self._grading = self._redaction.clean_report(GradeReport(output_tail=said))
                return None, _Failure("grader_failed", f"the grader failed: {why}")

    def _withdraw_grading(self) -> None:
        if self._grading_is_ordered and self._context.grader is not None:
            self._context.grader.withdraw(self.job.task)

    def _destroy_sandbox(self) -> None:
        if self._sandbox is None:
            return
        try:
            self._sandbox.destroy()
        except (PolarError, OSError) as failure:
            # what the session produced is not worth less for it
            self._log.count("sandboxes_left_behind")
            logger.warning("rollout %s: its sandbox could not be removed: %s", self.job.rollout_id, failure)

    def _reconstruct(self, rollout: Rollout) -> Reconstruction:
        """Rebuild the trajectories, check the laws, and close the record with a digest to check them by again."""
        context = self._context
        trained = count_as_policy(rollout) if context.train_auxiliary else rollout
        reconstruction = BUILDERS[BUILDER](trained)
        if not any(call.text_only for call in rollout.calls):  # the laws would refuse it, as nothing can be trained
            check_laws(trained, reconstruction)
        extra = {
            "trajectory_digest": digest(reconstruction.trajectories),
            "builder": BUILDER,
            "train_auxiliary": context.train_auxiliary,
            "summary": count_calls(rollout, reconstruction),
        }
        if (reason := find_reason(rollout)) is not None:
            extra["reason"] = {"name": reason.name, "detail": reason.detail}
        self._log.close(rollout, extra)
        return reconstruction

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Wait for a slot of a stage, and measure the time in it."""
        asked = time.monotonic()
        with self._context.stage_slots[name]:
            started = time.monotonic()
            self._seconds["queue"] += started - asked
            self._raise_if_cancelled()
            self._context.progress.enter(name)
            try:
                yield
            finally:
                self._seconds[name] = time.monotonic() - started
                self._context.progress.leave(name)

    def _raise_if_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise _Cancelled


@dataclass(frozen=True, slots=True)
class _Failure:
    """The reason why a session has no reward, for programs and for people."""

    kind: ErrorKind
    error: str


class _Cancelled(Exception):
    """The run is being stopped."""


class _Clock:
    """Kills the agent that runs inside the block once its time is up, or once it went past a limit of the proxy.

    Time for which it was held, or this process was stopped, does not count.
    """

    def __init__(
        self, sandbox: Sandbox, log: SessionLog, gate_stats: GateStats, limit_s: float, cut: StragglerCut
    ) -> None:
        self.stopped_as: StopReason | None = None
        self.pause_s = 0.0
        """For how long this process was stopped meanwhile."""
        self._heartbeat = Heartbeat()
        self._sandbox = sandbox
        self._log = log
        self._gate_stats = gate_stats
        self._limit_s = limit_s
        self._cut = cut
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="polar-agent-clock", daemon=True)

    def __enter__(self) -> "_Clock":
        self._started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._has_ended.set()
        self._thread.join()
        self.pause_s = self._heartbeat.look()

    def _watch(self) -> None:
        left_s = self._limit_s
        while not self._has_ended.wait(min(max(left_s, 0.0), CLOCK_POLL_INTERVAL_S)):
            pause_s = self._heartbeat.look()  # before the clock is read
            seconds = time.monotonic() - self._started - self._gate_stats.held_s - pause_s
            left_s = self._limit_s - seconds
            if self._log.exceeded:
                self.stopped_as = self.stopped_as or "limit_exceeded"
            elif left_s <= 0:
                self.stopped_as = self.stopped_as or "agent_timeout"
            elif seconds >= self._cut.limit_s:
                self.stopped_as = self.stopped_as or "straggler"
            if self.stopped_as is not None:
                # again and again until it has ended: the command may be about to start
                self._sandbox.kill()
                left_s = CLOCK_POLL_INTERVAL_S


def _describe_pause(pause_s: float, what: str) -> str:
    return f"this process was stopped for {pause_s:.0f} s while {what}: that says nothing of the agent"
