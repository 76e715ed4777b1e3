"""Lint a model's chat template on the probe or on a recorded session.

A session whose tokens are not this tokenizer's raises `ConfigError`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from polar_trl.errors import ConfigError, RenderError
from polar_trl.reconstruct import build_prefix_merged
from polar_trl.tools.lint_template.compare import Rewrite, compare
from polar_trl.tools.lint_template.load import POLICIES, LoadedModel, Policy, describe_limits, describe_refusal
from polar_trl.tools.lint_template.probe import Session, replay, run_probe
from polar_trl.tools.lint_template.report import ContextChange, LintReport, PolicyReport, TurnReport
from polar_trl.tools.lint_template.written import TurnWriter, Written, count_common
from polar_trl.types import Call, Message, Rollout

_NUM_CHECKED = 3
"""Calls of a session that are read again, to see that it is of this tokenizer."""
_SHOWN = 60
"""Characters of a changed context that are shown."""


def lint(
    model: LoadedModel,
    *,
    policy: Policy = "keep",
    recorded: Sequence[Call] | None = None,
    source: str = "probe",
    track: Callable[[Sequence[Call]], Iterable[Call]] = iter,
) -> LintReport:
    """Compare every turn with what the template writes for it in each later request.

    Args:
        model: See `load_model`.
        policy: How the run treats earlier reasoning: `thinking` of its file.
        recorded: Calls of a session (see `load_calls`); None takes the probe.
        source: Name of the conversation in the report.
        track: Wraps the calls while they are compared, to show progress.

    Raises `ConfigError` for a session that another tokenizer recorded.
    """
    writer = TurnWriter(model.template, model.tokenizer)
    notes: tuple[str, ...] = ()
    if recorded is None:
        sessions = {name: run_probe(model, writer, name) for name in POLICIES}
    else:
        notes = _check_tokenizer(model, policy, recorded)
        sessions = {name: replay(model.renderers[name], recorded) for name in POLICIES}
    session = sessions[policy]
    chains = {name: [find_earlier(call, other.calls) for call in other.calls] for name, other in sessions.items()}
    analysis = _Analysis(model, writer)
    for call in track(session.calls):
        analysis.add(call, chains[policy][call.index])
    return LintReport(
        model=model.name,
        renderer=model.renderer,
        why=model.why,
        limits=tuple(describe_limits(model.renderers[policy])),
        source=source,
        policy=policy,
        refusal=describe_refusal(model.renderers[policy], model.template),
        turns=tuple(_build_turn(call, session, sessions, chains, analysis) for call in session.calls),
        context_changes=tuple(analysis.context_changes),
        policies={name: _build_policy(other, chains[name]) for name, other in sessions.items()},
        unreadable=session.unreadable,
        notes=notes,
    )


class _Analysis:
    """Follows the template's text for each turn, request by request."""

    def __init__(self, model: LoadedModel, writer: TurnWriter) -> None:
        self._tokenizer = model.tokenizer
        self._writer = writer
        self._written: dict[int, Written | RenderError] = {}
        self._seen: dict[int, str | None] = {}
        """Call -> how its turn was written last."""
        self.rewrites: dict[int, list[Rewrite]] = {}
        self.context_changes: list[ContextChange] = []

    def add(self, call: Call, earlier: Sequence[Call]) -> None:
        """Compare all turns that this call's request has in its history."""
        messages = call.request.messages
        try:
            written: Written | RenderError = self._writer.write(messages, call.request.tools)
        except RenderError as error:
            written = error
        self._written[call.index] = written
        for turn in earlier:
            self._compare(turn, call, written)
        if earlier and isinstance(written, Written):
            self._compare_contexts(earlier[-1], call, written)

    def _compare(self, turn: Call, call: Call, written: Written | RenderError) -> None:
        known = self.rewrites.setdefault(turn.index, [])
        since = self._describe_since(turn, call)
        if isinstance(written, RenderError):
            _add(known, Rewrite(kinds=("refused",), call=call.index, since=since, detail=str(written)))
            return
        text = written.turns[_count_replies(turn.request.messages)]
        if turn.index in self._seen and self._seen[turn.index] == text:
            return
        self._seen[turn.index] = text
        if text is None:
            _add(known, Rewrite(kinds=("not found",), call=call.index, since=since))
            return
        own = self._written[turn.index]
        opening = own.opening if isinstance(own, Written) else ""
        found = compare(
            self._tokenizer,
            turn,
            opening,
            text,
            special_ids=self._writer.special_ids,
            call=call.index,
            since=since,
        )
        if found is not None:
            _add(known, found)

    def _describe_since(self, turn: Call, call: Call) -> str:
        between = call.request.messages[len(turn.request.messages) + 1 :]
        is_next = all(message.role != "assistant" for message in between)
        last = max((i for i, message in enumerate(between) if message.role == "assistant"), default=-1)
        asked = any(message.role == "user" for message in between[last + 1 :])
        if is_next:
            return "in the next request, which has a user message" if asked else "in the next request"
        return "once a user message follows" if asked else "later on"

    def _compare_contexts(self, previous: Call, call: Call, written: Written) -> None:
        before = self._written[previous.index]
        if not isinstance(before, Written) or not before.contexts or not written.contexts:
            return
        contexts = (*before.contexts[:-1], before.contexts[-1].removesuffix(before.opening))
        for old, new in zip(contexts, written.contexts, strict=False):
            if old != new:
                start = max(0, count_common(old, new) - _SHOWN // 3)
                change = ContextChange(
                    call=call.index, before=old[start : start + _SHOWN], after=new[start : start + _SHOWN]
                )
                self.context_changes.append(change)
                return


def find_earlier(call: Call, calls: Sequence[Call]) -> list[Call]:
    """List the calls before this one whose messages and reply begin its own, shortest first."""
    messages = call.request.messages
    found = []
    for other in calls[: call.index]:
        size = len(other.request.messages)
        if size < len(messages) and messages[size] == other.message and messages[:size] == other.request.messages:
            found.append(other)
    return sorted(found, key=lambda other: len(other.request.messages))


_Chains = Sequence[Sequence[Call]]
"""For each call, the calls that it goes on from."""


def _build_turn(
    call: Call,
    session: Session,
    sessions: Mapping[Policy, Session],
    chains: Mapping[Policy, _Chains],
    analysis: _Analysis,
) -> TurnReport:
    forks_at: dict[Policy, int | None] = {}
    is_followed = False
    for name, other in sessions.items():
        followers = [
            later for later in other.calls if call.index in (earlier.index for earlier in chains[name][later.index])
        ]
        is_followed = is_followed or bool(followers)
        kept: set[int | None] = {call.index}
        forks_at[name] = None
        for later in followers:
            if later.parent in kept or later.goes_on_from(other.calls[call.index]):
                kept.add(later.index)
            elif forks_at[name] is None:
                forks_at[name] = later.index
    return TurnReport(
        call=call.index,
        name=session.names[call.index],
        num_tokens=len(call.completion.token_ids),
        is_followed=is_followed,
        rewrites=tuple(analysis.rewrites.get(call.index, ())),
        forks_at=forks_at,
    )


def _build_policy(session: Session, chains: _Chains) -> PolicyReport:
    rollout = Rollout(id="lint", task_id="lint", group_id="lint", calls=session.calls)
    return PolicyReport(
        trajectories=len(build_prefix_merged(rollout).trajectories),
        conversations=sum(
            not earlier and call.purpose == "policy" for call, earlier in zip(session.calls, chains, strict=True)
        ),
        forks=sum(
            bool(earlier) and call.parent != earlier[-1].index and not call.goes_on_from(earlier[-1])
            for call, earlier in zip(session.calls, chains, strict=True)
        ),
        refusal=session.refusal,
    )


def _add(known: list[Rewrite], found: Rewrite) -> None:
    """Keep what is new: a kind that no earlier rewriting of the turn had."""
    kinds = {kind for rewrite in known for kind in rewrite.kinds}
    dropped = any(rewrite.drops_reasoning for rewrite in known)
    if not kinds.issuperset(found.kinds) or (found.drops_reasoning and not dropped):
        known.append(found)


def _count_replies(messages: Sequence[Message]) -> int:
    return sum(message.role == "assistant" for message in messages)


def _check_tokenizer(model: LoadedModel, policy: Policy, recorded: Sequence[Call]) -> tuple[str, ...]:
    """Note how the session was recorded. Raises `ConfigError` where its ids are not of this tokenizer."""
    renderer, size = model.renderers[policy], len(model.tokenizer)
    checked = recorded[:_NUM_CHECKED]
    for call in checked:
        ids, recorded_message = call.completion.token_ids, call.message
        readable = max(ids) < size
        message = renderer.parse(tuple(call.prompt_ids), ids, call.request.tools) if readable else None
        if (
            message is not None
            and message.text.strip().startswith(recorded_message.text.strip())
            and [made.name for made in message.tool_calls] == [made.name for made in recorded_message.tool_calls]
        ):
            break
    else:
        raise ConfigError(
            f"--session: its first {len(checked)} calls do not read as recorded with the tokenizer of {model.name}; "
            "name the model that the run trained"
        )
    first = recorded[0]
    try:
        same = renderer.render(first.request.messages, first.request.tools) == first.prompt_ids
    except RenderError:
        same = False
    if same:
        return ()
    return (
        "the recorded prompt of the first call is not what is written here: the run had another renderer, "
        "chat_template_kwargs or thinking",
    )
