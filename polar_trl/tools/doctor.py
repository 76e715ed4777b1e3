"""Check that an agent works on this machine: a real agent in a real session, with a scripted model.

The session takes the path of a training run (harness, sandbox, proxy, record, laws); only the sampler is scripted, so
neither a model nor a GPU is needed. An agent works if the file that it was asked for is there and its calls merge into
one trajectory.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import PolarError
from polar_trl.grade.command import CommandGrader
from polar_trl.harness.base import AgentHarness, Harness, require_launch
from polar_trl.proxy import Proxy
from polar_trl.recording.session import SessionLimits
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutResult, RolloutRunner
from polar_trl.rollout.session_run import SessionRun
from polar_trl.sandbox import build_backend
from polar_trl.sandbox.base import SandboxBackend
from polar_trl.tokens.base import Renderer
from polar_trl.tokens.bytes import START, ByteRenderer
from polar_trl.types import Message, Task, TokenIds

RENDERER = ByteRenderer()
MAX_MODEL_LEN = 1 << 21
"""Tokens; a byte is a token here, and agents send up to 100 kB with every call."""
_ASSISTANT = (START, *b"assistant\n")
_TOOLS = (START, *b"tools\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkup:
    """The result for one agent; the keys of the JSON report."""

    installed: str | None
    verified: str
    works: bool
    why: str
    """What is wrong and what to do; empty where it works."""
    prompt_tokens: int | None = None
    """Of its first request, as a model's chat format writes it; None where no model was given, or none was asked."""


def check_agent(
    harness: AgentHarness,
    name: str,
    *,
    install: bool = True,
    delay_s: float = 0.0,
    backend: SandboxBackend | None = None,
    model: Renderer | None = None,
    window: int | None = None,
    place: Task | None = None,
) -> Checkup:
    """Run one session of two turns: a shell command that writes a file, then the end.

    Args:
        harness: The agent.
        name: As it was asked for, with a version or without.
        install: Install it first where it is missing.
        delay_s: How long the scripted model takes for each answer.
        backend: Where it runs; None is the default sandbox.
        model: The chat format by which its first prompt is counted.
        window: The context window that this prompt has to fit.
        place: A task in whose image it runs.
    """
    num_tokens: int | None = None
    try:
        if install:
            harness.install()
        installed = harness.find_installed_version()
        if installed is None:
            why = f"{name} is not installed; run: polar-trl doctor --install {name}"
        else:
            task = build_task(delay_s, place)
            finished = _try(harness, task, delay_s, backend or build_backend("auto", mounts=harness.folders))
            num_tokens = None if model is None else _count_first_prompt(finished, model)
            why = _find_fault(finished)
            if not why and window is not None and num_tokens is not None and num_tokens >= window:
                why = f"its first prompt has {num_tokens} tokens, and the context window is {window}"
            elif not why and window is not None:
                require_launch(harness, max_model_len=window)  # what a run asks before it begins
    except PolarError as error:
        installed, why = harness.find_installed_version(), str(error)
    return Checkup(
        installed=installed, verified=harness.verified_version, works=not why, why=why, prompt_tokens=num_tokens
    )


def run_scripted_session(
    harness: Harness,
    replies: Sequence[Message] | Callable[[TokenIds], TokenIds],
    task: Task,
    *,
    backend: SandboxBackend,
    delay_s: float = 0.0,
    max_model_len: int = MAX_MODEL_LEN,
    limits: SessionLimits = SessionLimits(),
) -> RolloutResult:
    """Run one session of an agent whose model says `replies`, one per turn, or what a function makes of each prompt.

    The n-th reply answers a prompt with n assistant turns after the instruction, so that demonstrations, side requests
    and retries do not shift the script; after the last one, the model repeats it. A prompt without tools is a side
    request and is answered with a word.
    """
    script = replies if callable(replies) else answer_by_turn(replies, after=task.instruction)
    engine = ScriptedEngine(script, delay_s=delay_s, max_model_len=max_model_len)
    with _unreported(), Proxy(engine, RENDERER, params=GenerationParams(max_tokens=4096)) as proxy:
        runner = RolloutRunner(
            proxy=proxy,
            backend=backend,
            harness=harness,
            grader=CommandGrader(task.grader) if task.grader else None,
            config=RolloutConfig(limits=limits),
        )
        return runner.run([Job(rollout_id="doctor", group_id="doctor", task=task)])[0]


@contextmanager
def _unreported() -> Iterator[None]:
    """Keep sessions from logging why they have no reward: the caller has the rollout, and says it."""
    logger = logging.getLogger(SessionRun.__module__)
    logger.addFilter(_is_no_report)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_report)


def _is_no_report(record: logging.LogRecord) -> bool:
    return "has no reward" not in str(record.msg)


def answer_by_turn(replies: Sequence[Message], *, after: str = "") -> Callable[[TokenIds], TokenIds]:
    """Build a script for `ScriptedEngine` under `ByteRenderer` that picks the reply by the number of turns.

    Args:
        after: Turns are counted from the last place where this stands, if it stands anywhere.
    """
    mark = after.strip().encode()

    def answer(prompt_ids: TokenIds) -> TokenIds:
        if prompt_ids[: len(_TOOLS)] != _TOOLS:
            return RENDERER.spell(Message(role="assistant", text="hello"))
        start = bytes(token_id if token_id < 256 else 0 for token_id in prompt_ids).rfind(mark) if mark else 0
        num_turns = _count(prompt_ids[max(0, start) :], _ASSISTANT) - 1
        return RENDERER.spell(replies[min(num_turns, len(replies) - 1)])

    return answer


def build_task(delay_s: float, place: Task | None = None) -> Task:
    """Build the task of a checkup, in the image of another task if one is given."""
    return Task(
        id="doctor",
        instruction="Write the word hello into the file doctor.txt.",
        agent_timeout_s=180.0 + 4 * delay_s,
        grader='test "$(cat doctor.txt)" = hello',
        image=None if place is None else place.image,
        build_context=None if place is None else place.build_context,
    )


def _try(harness: AgentHarness, task: Task, delay_s: float, backend: SandboxBackend) -> RolloutResult:
    """Run the session of two turns."""
    text, tool_calls = harness.build_last_message("The file is written.")
    replies = [
        Message(
            role="assistant",
            reasoning="A file is wanted.",
            text="I write it.",
            tool_calls=(harness.build_shell_call("printf hello > doctor.txt"),),
        ),
        Message(role="assistant", text=text, tool_calls=tool_calls),
    ]
    return run_scripted_session(harness, replies, task, delay_s=delay_s, backend=backend)


def _count_first_prompt(finished: RolloutResult, model: Renderer) -> int | None:
    first = next((call.request for call in finished.rollout.calls if call.purpose == "policy"), None)
    return None if first is None else len(model.render(first.messages, first.tools))


def _find_fault(finished: RolloutResult) -> str:
    """Say why the agent does not work here; "" where it does."""
    rollout, counters = finished.rollout, finished.reconstruction.counters
    if rollout.error is not None:
        return rollout.error
    if rollout.reward != 1.0:
        return f"the shell command of the first turn was not run ({len(rollout.calls)} calls, {rollout.stop_reason})"
    if rollout.stop_reason != "completed":
        return f"the session did not come to its end: {rollout.stop_reason} after {len(rollout.calls)} calls"
    if counters["forks"]:
        return f"its {len(rollout.calls)} calls do not continue each other: {counters['forks']} forks"
    return ""


def _count(ids: Sequence[int], pattern: Sequence[int]) -> int:
    first, num, found, start = pattern[0], len(pattern), 0, 0
    while True:
        try:
            start = ids.index(first, start)
        except ValueError:
            return found
        found += tuple(ids[start : start + num]) == tuple(pattern)
        start += 1
