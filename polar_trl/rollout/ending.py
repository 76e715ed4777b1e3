"""Keep how an agent ended and what a grader said: bounded, and without the keys that the agent was given."""

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import replace

from polar_trl.sandbox.base import ExecResult
from polar_trl.types import AgentExit, GradeReport

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_MIN_SECRET = 8
"""Characters; shorter values are words such as "none", which mean something elsewhere."""
REDACTED = "[redacted]"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


class Redaction:
    """Removes secrets from texts.

    Args:
        env: Of the agent: values of variables whose names say that they are keys.
        secrets: More of them.
    """

    def __init__(self, env: Mapping[str, str] = {}, secrets: Iterable[str] = ()) -> None:
        found = {value for name, value in env.items() if _SECRET_NAME.search(name)} | set(secrets)
        self._secrets = sorted((value for value in found if len(value) >= _MIN_SECRET), key=len, reverse=True)

    def clean(self, text: str) -> str:
        """Return the text without the secrets."""
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        return text

    def build_exit(self, result: ExecResult) -> AgentExit:
        """Build the record of how an agent's command ended."""
        whole = replace(result, stdout=self.clean(result.stdout), stderr=self.clean(result.stderr))
        return AgentExit(exit_code=result.exit_code, signal=find_signal(result.exit_code), output_tail=whole.tail())

    def clean_report(self, report: GradeReport) -> GradeReport:
        """Return a grader's report without the secrets."""
        return replace(report, output_tail=self.clean(report.output_tail))


def find_signal(exit_code: int | None) -> str | None:
    """Return the name of the signal behind an exit code (128 + its number), None for an exit of the program's own.

    A command without an exit code was killed.
    """
    if exit_code is None:
        return signal.SIGKILL.name
    try:
        return signal.Signals(exit_code - 128).name
    except ValueError:
        return None


def describe_exit(ended: AgentExit, *, is_stopped: bool = False) -> str:
    """Describe how an agent ended, with the end of its output."""
    how = "stopped at its time limit" if is_stopped else name_exit(ended)
    said = ended.output_tail[-300:]
    return f"{how}; it printed: {said!r}" if said else f"{how}; it printed nothing"


def ended_before_first_call(ended: AgentExit, counters: Mapping[str, int]) -> bool:
    """Tell whether an agent whose calls had no answer failed before it made any: nothing of it was counted."""
    return bool(ended.exit_code) and not counters


def name_exit(ended: AgentExit) -> str:
    """Name how an agent ended: "exit code 127", "exit code 137 (SIGKILL)", "killed"."""
    if ended.exit_code is None:
        return "killed"
    return f"exit code {ended.exit_code}" + (f" ({ended.signal})" if ended.signal else "")


def to_one_line(text: str) -> str:
    """Return a text of the agent's as one line that a terminal may be given."""
    words = " ".join(_ESCAPES.sub("", text).split())
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def find_last_line(output: str) -> str:
    """Return the last line of what an agent printed, as `to_one_line`; "" where it printed nothing."""
    lines = [line for line in _ESCAPES.sub("", output).splitlines() if line.strip()]
    return to_one_line(lines[-1]) if lines else ""
