"""Build recorded sessions for the tests: by hand, or at random with few distinct ids so that prefixes collide."""

from collections.abc import Sequence

from hypothesis import strategies as st

from polar_trl.types import Call, ChatRequest, Completion, Message, Purpose, Rollout, TokenIds


def build_call(
    index: int, prompt_ids: Sequence[int], token_ids: Sequence[int], purpose: Purpose = "policy", version: int = 0
) -> Call:
    """A call whose logprobs differ from token to token and from call to call."""
    return Call(
        session_id="s",
        index=index,
        dialect="openai_chat",
        request=ChatRequest(messages=(Message(role="user"),)),
        prompt_ids=tuple(prompt_ids),
        completion=Completion(
            token_ids=tuple(token_ids),
            logprobs=tuple(-0.1 * (index + 1) - 0.001 * i for i in range(len(token_ids))),
            finish_reason="stop",
            first_policy_version=version,
            last_policy_version=version + 1,
        ),
        message=Message(role="assistant"),
        purpose=purpose,
    )


def build_rollout(
    *calls: tuple[Sequence[int], Sequence[int]] | tuple[Sequence[int], Sequence[int], Purpose],
) -> Rollout:
    """From (prompt ids, sampled ids[, purpose]) per call."""
    return Rollout(
        id="s", task_id="t", group_id="g", calls=tuple(build_call(i, *call) for i, call in enumerate(calls))
    )


ids = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """Conversations, sub-agents between them, retries, rewritten histories, compactions, auxiliary and empty calls."""
    calls: list[Call] = []
    for index in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["new", "continue", "continue", "continue", "retry", "rewrite", "compact"]))
        prompt: TokenIds = draw(ids)
        if calls and kind != "new":
            earlier = draw(st.sampled_from(calls))
            history = earlier.prompt_ids + earlier.completion.token_ids
            at = draw(st.integers(0, len(history) - 1))
            added = draw(st.lists(st.integers(0, 2), max_size=3).map(tuple))
            prompt = {
                "continue": history + added,
                "retry": earlier.prompt_ids,
                "rewrite": (*history[:at], 3, *history[at + 1 :], *added),
                "compact": (*history[:at], 4),
            }[kind]
        sampled = draw(st.one_of(ids, ids, ids, st.just(())))
        purpose: Purpose = draw(st.sampled_from(["policy", "policy", "policy", "auxiliary"]))
        calls.append(build_call(index, prompt, sampled, purpose, version=draw(st.integers(0, 3))))
    return Rollout(id="s", task_id="t", group_id="g", calls=tuple(calls))
