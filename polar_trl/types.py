"""The value types that every part exchanges: immutable, keyword-only, standard library only.

Shapes: P prompt tokens of a call, C sampled tokens of a call, T tokens of a trajectory.
Times are seconds. Log-probabilities are natural logarithms (nats).
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, Literal, TypeVar, overload

_T = TypeVar("_T")
TokenIds = tuple[int, ...]
Role = Literal["system", "developer", "user", "assistant", "tool"]
Purpose = Literal["policy", "auxiliary"]
FinishReason = Literal["stop", "length", "tool_calls"]
ToolKind = Literal["function", "freeform", "local_shell"]
StopReason = Literal[
    "completed",
    "agent_failed",
    "agent_timeout",
    "straggler",
    "limit_exceeded",
    "no_calls",
    "prepare_failed",
    "worker_lost",
    "cancelled",
]
ErrorKind = Literal[
    "prepare_failed",
    "sandbox_failed",
    "worker_lost",
    "model_calls_failed",
    "request_refused",
    "engine_busy",
    "no_calls",
    "grader_failed",
    "cancelled",
]


class SharedSequence(Sequence[_T], Generic[_T]):
    """An immutable sequence that begins with another one, and holds of its own only what it adds.

    The prompts of a session are held so: each begins with the one that it continues, and all of them together take the
    memory of the longest. It compares, adds, and hashes as a tuple of the same values does; a slice is a tuple. To
    find one value costs the number of sequences that it begins with: take a slice of many.

    Args:
        own: What it adds; never changed afterwards.
        base: What it begins with.
    """

    __slots__ = ("_length", "base", "own")

    def __init__(self, own: Sequence[_T], base: "SharedSequence[_T] | None" = None) -> None:
        self.own = own
        self.base = base
        self._length = len(own) + (0 if base is None else len(base))

    @classmethod
    def of(cls, values: Sequence[_T]) -> "SharedSequence[_T]":
        """Return the values as such a sequence; the same object where they are one already."""
        return values if isinstance(values, SharedSequence) else cls(values)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[_T, ...]: ...
    def __getitem__(self, index: int | slice) -> _T | tuple[_T, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step != 1:
                return tuple(self)[index]
            return tuple(chain.from_iterable(self.list_parts(start, stop)))
        position = range(self._length)[index]
        ((value,),) = self.list_parts(position, position + 1)
        return value

    def __iter__(self) -> Iterator[_T]:
        return chain.from_iterable(self.list_parts(0, self._length))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (SharedSequence, tuple)):
            return NotImplemented
        return len(self) == len(other) and begins_with(self, other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: tuple[_T, ...]) -> tuple[_T, ...]:
        return (*self, *other)

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np  # which otherwise asks for one value after the other

        return np.fromiter(self, dtype or np.int64, self._length)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedSequence, (tuple(self),)  # by sequence and base, a long session would be too deep to pickle

    def list_parts(self, start: int, stop: int) -> list[Sequence[_T]]:
        """List the pieces that the values at `start` to `stop` (excluded) lie in, in order, without copies of them."""
        parts: list[Sequence[_T]] = []
        part: SharedSequence[_T] | None = self
        while part is not None and len(part) > start:
            first = len(part) - len(part.own)
            if first < stop:
                whole = start <= first and stop >= len(part)
                parts.append(part.own if whole else part.own[max(start - first, 0) : stop - first])
            part = part.base
        return parts[::-1]


def count_shared(one: Sequence[_T], other: Sequence[_T]) -> int:
    """Count the values that two sequences hold as the same `SharedSequence`: they begin with these, uncompared."""
    while one is not other:
        if not (isinstance(one, SharedSequence) and isinstance(other, SharedSequence)):
            return 0
        # of two of one length, one that adds nothing may begin with the other
        if len(one) > len(other) or (len(one) == len(other) and (not one.own or other.own)):
            one = one.base or ()
        else:
            other = other.base or ()
    return len(one)


def begins_with(whole: Sequence[Any], prefix: Sequence[Any]) -> bool:
    """Tell whether `whole` begins with `prefix`. What they share is not compared again."""
    if len(prefix) > len(whole):
        return False
    start, stop = count_shared(whole, prefix), len(prefix)
    if _holds_ids(whole) and _holds_ids(prefix):
        return pack_ids(whole, start, stop) == pack_ids(prefix, start, stop)
    return tuple(whole[start:stop]) == tuple(prefix[start:stop])


def share_ids(ids: Sequence[int], base: Sequence[int] = ()) -> SharedSequence[int]:
    """Hold token ids in eight bytes each; those of `base`, which they must begin with, not again."""
    shared = base if isinstance(base, SharedSequence) else None
    return SharedSequence(array("q", ids if shared is None else ids[len(shared) :]), shared)


def pack_ids(ids: Sequence[int], start: int = 0, stop: int | None = None) -> bytes:
    """Pack token ids into eight bytes each, in the order of this machine: a prefix of ids is one of bytes."""
    stop = len(ids) if stop is None else stop
    parts = ids.list_parts(start, stop) if isinstance(ids, SharedSequence) else [ids[start:stop]]
    return b"".join(part if isinstance(part, array) else array("q", part) for part in parts)


def _holds_ids(sequence: Sequence[Any]) -> bool:
    return isinstance(sequence, SharedSequence) and isinstance(sequence.own, array)


@dataclass(frozen=True, kw_only=True, slots=True)
class TestSpec:
    """The tests that decide a task: which must pass, and how to lay and run them in a tree made afresh."""

    __test__ = False  # its name makes pytest look for tests in it

    fail_to_pass: tuple[str, ...]
    """Ids of tests that fail before the fix and must pass after it."""
    pass_to_pass: tuple[str, ...] = ()
    """Ids of tests that pass before the fix and must still pass."""
    runner: str = "pytest"
    """"pytest": ids are its node ids, relative to the work folder. "swebench": the row in `Task.metadata` says how."""
    python: str = "python3"
    """The program inside the sandbox that runs pytest."""
    requirements: str | None = None
    """Host path of a requirements file with all that the tests import; None: the sandbox has it."""
    folder: str = ""
    """Host folder of hidden test files, which are laid over the work folder for grading; "" where there is none."""
    files: tuple[str, ...] = ()
    """Paths of the hidden files, relative to `folder` and to the work folder alike."""
    removed: tuple[str, ...] = ()
    """Test files that the agent sees, removed before the hidden ones are laid."""
    paths: tuple[str, ...] = ()
    """What the runner is given: test files and folders, relative to the work folder."""
    import_roots: tuple[str, ...] = (".",)
    """Folders of the work folder that the tests import the package from, in order."""
    protected: tuple[str, ...] = ()
    """Patterns (`fnmatch`, `*` matches "/" too) of paths at which the agent's changes are dropped for grading."""
    gold_patch: str | None = None
    """Host path of a patch that solves the task; None where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One row of a data set: what the agent is asked to do, and where."""

    id: str
    instruction: str
    image: str | None = None
    """Container image; None where the sandbox backend needs none."""
    build_context: str | None = None
    """Folder of this machine with the Dockerfile that `image` is built from where none is named."""
    workspace: str | None = None
    """Folder of this machine that the work folder begins as; never written to."""
    workdir: str | None = None
    """Absolute path of the work folder in the sandbox; None leaves it to the sandbox. Without `workspace`, the work
    folder begins as what the image has there."""
    network: Literal["none", "public"] = "none"
    """What can be reached besides the proxy: nothing, or whatever the container engine's own network reaches."""
    writable_root: bool = False
    """Whether files outside of the work folder, HOME and /tmp can be changed (images only; no disk limit there)."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path relative to the work folder -> text, laid over that before the agent starts."""
    start_patch: str | None = None
    """A patch of git's that the work folder begins with, such as one that puts a bug in. What is there is one commit
    then: a history would show the patch."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Extra environment of the agent."""
    agent: str | None = None
    """Name of the agent that plays it, of those of the run; None leaves it to the run."""
    cut_sessions: Literal["train", "mask", "leave_out"] | None = None
    """What becomes of sessions that a limit ended (`polar_trl.grpo.config`); None leaves it to the run."""
    prepare_timeout_s: float = 120.0
    agent_timeout_s: float = 600.0
    grade_timeout_s: float = 120.0
    grader: str | None = None
    """Shell command that grades the work folder; None leaves it to the run's grader."""
    tests: TestSpec | None = None
    """Tests that decide; None where something else does."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Anything else a grader or a reward function wants (JSON values)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call of a tool, as the model emitted it."""

    id: str
    name: str
    arguments: str
    """JSON text exactly as emitted; not necessarily valid, see `parse_status`."""
    parse_status: Literal["ok", "malformed"] = "ok"


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn of a conversation, in no provider's shape."""

    role: Role
    text: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """On a tool message: the call that it answers."""
    images: tuple[str, ...] = ()
    """URLs, `data:` URLs included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function the model may call."""

    name: str
    """As the model sees it; with a namespace, "namespace__name"."""
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments."""
    kind: ToolKind = "function"
    """How its dialect declared it. The model sees a function in any case; the reply calls what was declared."""
    namespace: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedSampling:
    """The sampling parameters of an agent's request; None where it named none. Training uses the trainer's own."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A model call in normal form: what any dialect's body says, and what we did not understand."""

    messages: Sequence[Message]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    """"auto", "none", "required", or the name of one tool."""
    sampling: RequestedSampling = RequestedSampling()
    stream: bool = False
    model: str = ""
    """The label that the agent sent; it chooses nothing."""
    unread: tuple[str, ...] = ()
    """Paths of fields that were seen and not understood."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The tokens that the engine sampled for one prompt."""

    token_ids: TokenIds
    """[C], the end-of-turn token included if it was sampled."""
    logprobs: tuple[float, ...]
    """[C], nats, under the distribution that was sampled (temperature applied)."""
    finish_reason: FinishReason
    first_policy_version: int = 0
    """Policy version that sampled the first token."""
    last_policy_version: int = 0
    """Policy version that sampled the last token."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} token ids but {len(self.logprobs)} logprobs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One recorded model call. The reply that the agent got was rendered from this object."""

    session_id: str
    index: int
    """Position in the session's record, from 0."""
    dialect: str
    request: ChatRequest
    prompt_ids: Sequence[int] = field(repr=False)
    """[P], as given to the engine."""
    completion: Completion
    message: Message
    """The completion, parsed; what the reply was rendered from."""
    stop_text: str | None = None
    """The requested stop text that ended it; sampled, and cut from `message`."""
    parent: int | None = None
    """Index of the call whose prompt and sampled ids begin this prompt; None where it was rendered anew."""
    purpose: Purpose = "policy"
    text_only: bool = False
    """The reply came as text from a server that gives no token ids: `prompt_ids` and `completion` hold none, and the
    laws refuse to train on it."""
    started_s: float = 0.0
    """Seconds since the epoch."""
    duration_s: float = 0.0

    @property
    def is_answered(self) -> bool:
        """Tell whether the model said something; a budget message is the proxy's own."""
        return bool(self.completion.token_ids) or self.text_only

    def goes_on_from(self, before: "Call") -> bool:
        """Tell whether the prompt begins with that call's prompt and what was sampled after it."""
        start, sampled = len(before.prompt_ids), before.completion.token_ids
        prompt_ids = self.prompt_ids
        return begins_with(prompt_ids, before.prompt_ids) and prompt_ids[start : start + len(sampled)] == sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentExit:
    """How an agent's command ended."""

    exit_code: int | None
    """None where it was killed: at its time limit, at a limit of the proxy, or because the run ended."""
    signal: str | None = None
    """Name of the signal that ended it, such as "SIGKILL"; its exit code is then 128 more than the number, or None."""
    output_tail: str = ""
    """The end of what it printed, at most 4,000 characters, without the keys that it was given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradeReport:
    """What a grader and its tests said. Of tests only those that decide count; graders by command count none."""

    output_tail: str = ""
    """The end of what the grader printed, or the messages of failed tests; at most 4,000 characters."""
    failed_tests: tuple[str, ...] = ()
    """Tests that ran and did not pass, the first 100."""
    missing_tests: tuple[str, ...] = ()
    """Tests that have no outcome although others do: they were not found. The first 100."""
    num_tests: int = 0
    num_passed: int = 0
    num_failed: int = 0
    num_missing: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One session, from a task to a reward or to the reason why there is none."""

    id: str
    task_id: str
    group_id: str
    calls: tuple[Call, ...] = field(default=(), repr=False)
    stop_reason: StopReason = "completed"
    reward: float | None = None
    """None: no reward could be determined. Never a stand-in for 0."""
    call_rewards: Mapping[int, float] | None = None
    """Rewards of single calls, by their index; None where the grader gave none."""
    error: str | None = None
    """Why there is no reward, in words for people."""
    error_kind: ErrorKind | None = None
    """What failed, for programs; None without an error, and in records from before there were kinds."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Phase ("queue", "prepare", "agent", "held", "grade") -> seconds. What was held is no part of the agent's."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Named counts of the session, such as "retries_replayed" and "calls_aborted"."""
    agent_exit: AgentExit | None = None
    """None where the agent was not started, and in records from before this was kept; the next two likewise."""
    grading: GradeReport | None = None
    """None where the session was not graded."""
    agent: str | None = None
    """Name of the agent, of those of the run; None in records from before this was kept."""
    changes: str | None = None
    """What the agent changed in its work folder, as a unified diff of at most 20,000 characters; lines that begin with
    "#" are ours. "" where it changed nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One row of training: ids exactly as the engine saw them, with a mask over what it sampled."""

    rollout_id: str
    call_indices: tuple[int, ...]
    """The calls whose samples are trainable here, in order."""
    token_ids: Sequence[int]
    """[T]"""
    trainable: tuple[bool, ...]
    """[T], the loss mask: True exactly on sampled tokens that this trajectory trains."""
    logprobs: tuple[float, ...]
    """[T], 0.0 where not trainable."""
    policy_versions: tuple[int, ...]
    """[T], -1 where not trainable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """The address, key and limits of the model that a session's agent talks to."""

    origin: str
    """Scheme, host and port, such as "http://127.0.0.1:41123"; dialects add their own path."""
    api_key: str
    model: str
    max_model_len: int = 32768
    """Tokens of a prompt and its answer together: what an agent should take for its context window."""
    max_tokens: int = 8192
    """The most tokens of one answer."""
