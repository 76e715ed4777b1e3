"""Play the sessions that every system is given, and judge the rows that it makes of them; standard library only.

A scripted agent talks Chat Completions. The last message of each of its requests carries a mark such as `[main 3]`,
and the scripted policy answers by that mark, so every system is asked for the same text. Each sampled token has a
log-probability of its own: a trained token is traced by it to the one sample that it can have come from.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Post = Callable[[list[dict[str, Any]], Mapping[str, str]], dict[str, Any]]
"""Sends messages with extra headers, and returns the assistant's message."""

KINDS = (
    "linear tools",
    "sub-agent",
    "compaction",
    "whitespace stripped, with a tool call",
    "whitespace stripped, text only",
    "arguments re-serialised",
    "retry",
    "agent drops reasoning",
    "reasoning kept, user speaks again",
    "cut by length",
    "sample not canonically tokenised",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
RETRY_HEADER = {"x-stainless-retry-count": "1"}
"""The OpenAI SDK sends it with a request that it repeats."""
_WORDS = [
    "the",
    "parser",
    "reads",
    "a",
    "line",
    "and",
    "then",
    "checks",
    "each",
    "of",
    "its",
    "fields",
    "before",
    "it",
    "writes",
    "some",
    "more",
    "to",
    "that",
    "file",
]


# The agent


def play_session(kind: str, turns: int, post: Post) -> None:
    """Play one session of `turns` turns in the main conversation, and those of its sub-agents."""
    messages = _begin("You are a coding agent.", "Fix the bug.", "main")
    for turn in range(turns):
        if kind == "compaction" and turn == turns // 2:
            asked = [*messages, {"role": "user", "content": "Summarize the work so far. [summary 0]"}]
            summary = post(asked, {})["content"]
            messages = _begin("You are a coding agent.", f"The work so far: {summary} Go on.", "main", turn)
        reply = post(messages, {})
        if kind == "retry" and turn % 3 == 1 and turn < turns - 1:  # the first answer got lost on its way
            reply = post(messages, RETRY_HEADER if turn % 2 else {})
        if kind == "sub-agent" and turn % 4 == 2:
            _play_sub_agent(f"sub{turn}", post)
        _go_on(kind, messages, reply, f"[main {turn + 1}]")


def _play_sub_agent(name: str, post: Post) -> None:
    messages = _begin("You are a sub-agent that looks things up.", "Find the caller.", name)
    for turn in range(3):
        _go_on("", messages, post(messages, {}), f"[{name} {turn + 1}]")


def _begin(system: str, user: str, name: str, turn: int = 0) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": f"{user} [{name} {turn}]"}]


def _go_on(kind: str, messages: list[dict[str, Any]], reply: Mapping[str, Any], mark: str) -> None:
    """Append the reply, as an agent of that kind keeps it, and what comes after it."""
    kept = {key: reply[key] for key in ("role", "content", "reasoning_content", "tool_calls") if reply.get(key)}
    kept.setdefault("content", "")
    if kind.startswith("whitespace stripped"):
        kept["content"] = kept["content"].strip()
    if kind == "agent drops reasoning":
        kept.pop("reasoning_content", None)
    calls = kept.get("tool_calls", [])
    if kind == "arguments re-serialised":
        for call in calls:
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    messages.append(kept)
    for call in calls:
        text = f"{_talk(random.Random(mark), 12)}\n{mark}"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    if not calls or (kind == "reasoning kept, user speaks again" and int(mark.split()[1][:-1]) % 4 == 0):
        messages.append({"role": "user", "content": f"Go on. {mark}"})


# The policy


@dataclass(frozen=True)
class Reply:
    """What the policy says at one mark."""

    text: str
    is_cut: bool = False
    """It ends by the limit of tokens, before its end-of-turn token."""
    is_odd: bool = False
    """Its tokens are not those that encoding its text gives."""


def write_reply(kind: str, turns: int, name: str, number: int, attempt: int) -> Reply:
    """Write what the policy says at mark `[name number]`, in Qwen3's format; another thing at each attempt."""
    source = random.Random(f"{kind} {turns} {name} {number} {attempt}")
    text = f"{_talk(source, source.randint(8, 24)).capitalize()}."
    if name == "summary":
        return Reply(text)
    if kind == "cut by length" and number % 3 == 1:
        return Reply(text, is_cut=True)
    if kind == "whitespace stripped, text only":
        return Reply(f" {text} \n\n")
    if kind == "whitespace stripped, with a tool call":
        text = f" {text} \n\n"
    arguments = json.dumps({"command": f"sed -n {source.randint(1, 99)},40p module.py"})
    if kind == "arguments re-serialised":
        arguments = arguments.replace('": "', '":"')
    text += f'\n<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'
    if "reasoning" in kind:
        text = f"<think>\n{_talk(source, 14).capitalize()}.\n</think>\n\n{text}"
    return Reply(text, is_odd=kind == "sample not canonically tokenised" and number % 2 == 1)


def _talk(source: random.Random, num_words: int) -> str:
    return " ".join(source.choice(_WORDS) for _ in range(num_words))


# The judge


@dataclass(frozen=True)
class Sample:
    """One answer of the engine: the prompt that it got, and what it sampled."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Of each token, and of no other token of the session."""


@dataclass(frozen=True)
class Row:
    """One row of training, in one length."""

    token_ids: Sequence[int]
    trained: Sequence[bool | int]
    logprobs: Sequence[float]


COLUMNS = ("calls", "sampled", "rows", "row_tokens", "once", "twice", "lost", "drift", "never")


def judge(samples: Sequence[Sample], rows: Iterable[Row]) -> Counter[str]:
    """Count, of one session, the columns of table A.

    Of the sampled tokens, `once`, `twice` and `lost` are trained at one place, at more, and nowhere. Of the trained
    ones, `drift` have other ids before them than they were sampled behind, and `never` were not sampled. Raises
    `ValueError` if the samples' log-probabilities are not unique, or a row's fields differ in length.
    """
    where = {logprob: (s, i) for s, sample in enumerate(samples) for i, logprob in enumerate(sample.logprobs)}
    num_sampled = sum(len(sample.token_ids) for sample in samples)
    if len(where) != num_sampled:
        raise ValueError(f"{num_sampled} sampled tokens have {len(where)} different log-probabilities")
    counts = Counter(dict.fromkeys(COLUMNS, 0), calls=len(samples), sampled=num_sampled)
    trained: Counter[tuple[int, int]] = Counter()
    for row in rows:
        if not len(row.token_ids) == len(row.trained) == len(row.logprobs):
            raise ValueError(
                f"a row of {len(row.token_ids)} ids, {len(row.trained)} marks, {len(row.logprobs)} logprobs"
            )
        counts.update(rows=1, row_tokens=len(row.token_ids))
        ids = list(row.token_ids)
        before: tuple[int, int] | None = None
        has_drifted = False
        for position, token_id in enumerate(ids):
            if not row.trained[position]:
                before = None
                continue
            place = where.get(row.logprobs[position])
            if place is None or samples[place[0]].token_ids[place[1]] != token_id:
                counts["never"] += 1
                before = None
                continue
            trained[place] += 1
            if before is None or place != (before[0], before[1] + 1):
                sample = samples[place[0]]
                has_drifted = ids[:position] != [*sample.prompt_ids, *sample.token_ids[: place[1]]]
            counts["drift"] += has_drifted
            before = place
    counts["once"] = sum(count == 1 for count in trained.values())
    counts["twice"] = sum(count > 1 for count in trained.values())
    counts["lost"] = num_sampled - len(trained)
    return counts
