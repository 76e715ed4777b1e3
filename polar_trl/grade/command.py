"""Grade by a shell command in the finished sandbox: its exit code, or the number that it prints, is the reward.

A command that hangs or fails, in any way but "1, the work is wrong", runs once more over the untouched task, in a
fresh sandbox. Where it decides there, the agent's files were what broke it: reward 0, and `graders_broken`. Else, and
without a backend, the command itself is broken and has decided nothing: `GradeError`.
"""

from typing import Literal

from polar_trl.errors import GradeError, NotFiniteRewardError
from polar_trl.grade.base import Grade, Grader, is_finite_reward, report_output
from polar_trl.grade.fresh import FreshSandboxes
from polar_trl.sandbox.base import ExecResult, Sandbox, SandboxBackend
from polar_trl.types import Task

BROKEN = "graders_broken"


class CommandGrader(Grader):
    """Grades by running a command in the work folder.

    Args:
        command: For bash; a task's own `grader` comes before it.
        reward: "exit_code": 0 is reward 1, 1 is reward 0, and any other exit (127, a signal) means that the grader
            failed. "stdout": it exits with 0, and the last line that it prints is the reward.
        backend: Makes the sandboxes in which a command that failed is tried over the untouched task. None: it is not.
    """

    def __init__(
        self,
        command: str | None = None,
        *,
        reward: Literal["exit_code", "stdout"] = "exit_code",
        backend: SandboxBackend | None = None,
    ) -> None:
        self._command = command
        self._reward = reward
        self._fresh = None if backend is None else FreshSandboxes(backend)

    def grade(self, task: Task, sandbox: Sandbox, *, timeout_s: float) -> Grade:
        """Return the reward. Raises `GradeError` where the command decided nothing."""
        command = task.grader or self._command
        # a blank one would exit with 0 and reward everything
        if command is None or not command.strip():
            raise GradeError(f"task {task.id} names no grader command and the run has none; set one of them")
        result = sandbox.run(command, env=task.env, timeout_s=timeout_s)
        if result.exit_code is None and not (result.timed_out or result.out_of_memory):
            raise GradeError("the grader was killed")  # by us: nothing in a sandbox can
        try:
            return Grade(reward=self._judge(result, timeout_s), report=report_output(result.tail()))
        except GradeError as failure:
            if self._fresh is None:
                raise
            with self._fresh.open(task, with_files=True) as untouched:
                tried = untouched.run(command, env=task.env, timeout_s=timeout_s)
                try:
                    self._judge(tried, timeout_s)
                except GradeError as other:
                    why = f"{failure} (and over the untouched task: {other})"
                    raise type(failure)(why, output=result.tail()) from failure
            return Grade(reward=0.0, counters={BROKEN: 1}, report=report_output(result.tail()))

    def _judge(self, result: ExecResult, timeout_s: float) -> float:
        """Return the reward. Raises `GradeError` where the command has decided nothing."""
        if result.timed_out:
            raise GradeError(f"the grader ran longer than {timeout_s:g} s", output=result.tail())
        if result.exit_code is None:
            raise GradeError("the grader ran out of memory", output=result.tail())
        if self._reward == "stdout":
            return _parse_printed_reward(result)
        if result.exit_code not in (0, 1):
            why = f"the grader ended with exit code {result.exit_code}, neither 0 nor 1{_said(result)}"
            raise GradeError(why, output=result.tail())
        return 1.0 - result.exit_code


def _parse_printed_reward(result: ExecResult) -> float:
    if result.exit_code != 0:
        raise GradeError(f"the grader ended with exit code {result.exit_code}{_said(result)}", output=result.tail())
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    try:
        value = float(lines[-1])
    except (IndexError, ValueError):
        why = f"the last line that the grader printed is no number{_said(result)}"
        raise GradeError(why, output=result.tail()) from None
    if not is_finite_reward(value):
        raise NotFiniteRewardError(f"the grader printed {value}, which is no reward", output=result.tail())
    return value


def _said(result: ExecResult) -> str:
    said = (result.stderr.strip() or result.stdout.strip())[-300:]
    return f"; it printed: {said!r}" if said else "; it printed nothing"
