"""The error types, one class per boundary.

PolarError
├── ConfigError      a setting or a file the user wrote is wrong; says which and what to do
│   └── TaskError    a task row is wrong; names its id or line and the field
├── WireError        a request the agent sent is wrong; carries the HTTP status and the field's path
│   └── ContextOverflowError   the conversation does not fit the model's context
├── RenderError      the chat template cannot express this conversation
├── EngineError      the engine failed or was closed while a request was in flight
│   └── EngineBusyError   the engine takes no requests for now; says when to ask again
├── SandboxError     a sandbox could not be made, reached or limited as asked
│   ├── WorkerLostError     the node of a cluster that it was on is gone; names it
│   ├── FileTooLargeError   a file in it is larger than the reader takes: the agent's doing, nothing is broken
│   └── TreeUnreadableError   so many folders in each other, or rights so few, that it cannot be read: likewise
├── GradeError       a grader could not decide; the rollout has no reward
│   └── NotFiniteRewardError   it gave NaN, infinity, or what float32 cannot hold
├── StepError        optimizer steps cannot be made, or have spoiled the weights; ends the run before a checkpoint
├── DiskError        a disk is full or read-only; ends the run, which goes on from its newest checkpoint afterwards
├── RecordError      a session's file cannot be read back
└── LawError         a law of the design is broken; names the rollout and stops the run
"""

import re
from typing import Literal

WireErrorKind = Literal["invalid_request", "authentication", "not_found", "context_overflow", "overloaded", "internal"]


_MESSAGE_LENGTH = 2000
_FIELD = re.compile(r"([A-Za-z_]\w*)[\w.\[\]]*: ")


class PolarError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(PolarError):
    """A setting, path or file from the user is wrong."""


class TaskError(ConfigError):
    """A task row cannot be used."""


class WireError(PolarError):
    """A request cannot be served as sent.

    Args:
        message: One sentence, starting with the path of the offending field where there is one.
        status: HTTP status.
        kind: The error's kind in no dialect's words: "invalid_request", "authentication", "not_found",
            "context_overflow", "overloaded" or "internal"; each dialect has its own name for it.
        retry_after_s: When the same request may be sent again; None: it is hopeless, or nobody knows.
        reason: The word by which it is counted where it refuses a request; None is the first name of the field's
            path, or "body"; "" for what has a counter already.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: WireErrorKind = "invalid_request",
        retry_after_s: float | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message[:_MESSAGE_LENGTH])  # it may quote the request
        self.status = status
        self.kind = kind
        self.retry_after_s = retry_after_s
        named = _FIELD.match(message)
        self.reason = reason if reason is not None else named[1] if named else "body"

    @property
    def is_agents_own(self) -> bool:
        """Tell whether any server would refuse the request: it is too long, too large, or comes after the end. Other
        refusals say that we do not read what a provider reads."""
        return self.kind in ("context_overflow", "authentication") or self.status == 413


class ContextOverflowError(WireError):
    """The prompt leaves no room in the model's context.

    Args:
        num_tokens: Length of the prompt.
        max_tokens: Length of the context.
        at_least: The prompt was not encoded, and is longer.
    """

    def __init__(self, num_tokens: int, max_tokens: int, *, at_least: bool = False) -> None:
        counted = "the prompt is longer, it was not encoded" if at_least else "one token is kept for the answer"
        self.advice = f"vllm_max_model_length sets the context length of {max_tokens} tokens; {counted}."
        super().__init__(
            f"prompt is too long: {num_tokens} tokens > {max_tokens - 1} maximum. {self.advice}",
            kind="context_overflow",
            reason="context_overflow",
        )
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class RenderError(PolarError):
    """The model's chat template cannot express a conversation."""


class EngineError(PolarError):
    """The engine failed, or was closed, while a request was in flight."""


class EngineBusyError(EngineError):
    """The engine takes no requests for now.

    Args:
        message: One sentence.
        retry_after_s: When to ask again.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SandboxError(PolarError):
    """A sandbox could not be made, reached or limited as asked."""


class WorkerLostError(SandboxError):
    """The node of a cluster that a sandbox was on does not answer any more.

    Args:
        node: Its name.
        reason: How that was noticed.
    """

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(node, reason)  # which is what it is pickled by
        self.node = node

    def __str__(self) -> str:
        return "node {} was lost: {}".format(*self.args)


class FileTooLargeError(SandboxError):
    """A file in a sandbox is larger than the reader takes. The agent's doing: a grader may hold it against it."""


class TreeUnreadableError(SandboxError):
    """A folder is nested too deep, or may not be read. The agent's doing, as above."""


class GradeError(PolarError):
    """A grader could not decide. The rollout has no reward, which is not a reward of 0.

    Args:
        message: One sentence.
        output: The end of what the grader printed, or of its traceback.
    """

    def __init__(self, message: str, *, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class NotFiniteRewardError(GradeError):
    """A grader gave NaN, infinity, or a number that float32 cannot hold."""


class DiskError(PolarError):
    """A disk that the run writes on is full, over its quota, read-only or broken."""


class RecordError(PolarError):
    """A session's record cannot be read back."""


class StepError(PolarError):
    """Losses or gradients that are not finite keep the optimizer from its steps, or a step has spoiled the weights."""


class LawError(PolarError):
    """A law of the design is broken: a bug, not a fact of the world. Stops the run."""
