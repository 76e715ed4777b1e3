"""Build fine-tuning examples of a recorded session: a conversation each, with token ids and a loss mask if recorded.

An example with token ids is a trajectory of the session, checked against the laws: its mask is exactly what the model
sampled. Without token ids, it is a conversation that no later call goes on from. Nothing is tokenized here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from datasets import Json
from numpy.typing import NDArray

from polar_trl.json_text import mend_json
from polar_trl.reconstruct import BUILDERS, check_laws, count_as_policy
from polar_trl.tokens.chat_dicts import build_message_dict, build_tool_dict, place_system
from polar_trl.types import Call, Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One sequence to fine-tune on."""

    id: str
    """The rollout's id and the example's number in it."""
    messages: list[dict[str, Any]] | None
    """As chat templates read them, the last one the model's; None where they cannot be had: tool arguments that are
    no JSON object, which templates refuse, or what `datasets` would not give back from JSON (half a surrogate pair,
    NaN, an integer of more than 64 bits)."""
    tools: list[dict[str, Any]]
    token_ids_T: NDArray[np.int32] | None
    """None for text only."""
    mask_T: NDArray[np.int8] | None
    """The loss mask: 1 exactly on what the model sampled in this example."""


def build_examples(rollout: Rollout, *, with_auxiliary: bool = False) -> list[Example]:
    """Build the examples of a session, in the order of their first call.

    Args:
        with_auxiliary: Take what the agent asked beside its task (titles, summaries) like the rest.

    Raises `LawError` if the rebuilt trajectories break a law.
    """
    if with_auxiliary:
        rollout = count_as_policy(rollout)
    if any(call.text_only for call in rollout.calls):
        return [_build_example(rollout, number, call) for number, call in enumerate(_list_ends(rollout.calls))]
    reconstruction = BUILDERS["prefix_merging"](rollout)
    check_laws(rollout, reconstruction)
    return [
        _build_example(
            rollout,
            number,
            rollout.calls[trajectory.call_indices[-1]],
            token_ids_T=np.array(trajectory.token_ids, dtype=np.int32),
            mask_T=np.array(trajectory.trainable, dtype=np.int8),
        )
        for number, trajectory in enumerate(reconstruction.trajectories)
    ]


def _build_example(
    rollout: Rollout,
    number: int,
    last: Call,
    *,
    token_ids_T: NDArray[np.int32] | None = None,
    mask_T: NDArray[np.int8] | None = None,
) -> Example:
    """Build the example of the conversation that ends with the reply of `last`."""
    conversation = place_system((*last.request.messages, last.message), "first", at_start=True)
    messages: list[dict[str, Any]] | None
    messages = [build_message_dict(message, parse_arguments=True) for message in conversation]
    tools = [build_tool_dict(tool) for tool in last.request.tools]
    is_as_sampled = all(mend_json(call.arguments) == call.arguments for m in conversation for call in m.tool_calls)
    if not (is_as_sampled and all(map(_has_readable_arguments, messages)) and _survives_json([messages, tools])):
        messages = None
    return Example(
        id=f"{rollout.id}-{number}",
        messages=messages,
        tools=tools,
        token_ids_T=token_ids_T,
        mask_T=mask_T,
    )


def _has_readable_arguments(message: Mapping[str, Any]) -> bool:
    return all(isinstance(call["function"]["arguments"], dict) for call in message.get("tool_calls", ()))


def _survives_json(value: Any) -> bool:
    """Return whether `datasets` gives back from JSON what was written."""
    try:
        return bool(Json().decode_example(orjson.dumps(value).decode()) == value)
    except (TypeError, ValueError, RecursionError):  # what orjson and the library raise
        return False


def _list_ends(calls: Sequence[Call]) -> list[Call]:
    """List the policy's calls that none goes on from; of the same question asked twice and left twice, the last."""
    asked = [call for call in calls if call.is_answered and call.purpose == "policy"]
    continued = {call.parent for call in asked}
    ends = [call for call in asked if call.index not in continued]
    return [
        call
        for position, call in enumerate(ends)
        if not any(_asks_the_same(call, later) for later in ends[position + 1 :])
    ]


def _asks_the_same(call: Call, other: Call) -> bool:
    return call.request.messages == other.request.messages and call.request.tools == other.request.tools
