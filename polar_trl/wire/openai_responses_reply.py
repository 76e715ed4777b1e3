"""Render calls as Responses: the output items of a reply, the response around them, and the events of a stream.

Items call tools as they were declared. Arguments that a kind of call cannot carry are not repaired: the client gets
them as they were sampled, and its complaint goes to the model.
"""

from collections.abc import Iterator
from typing import Any

import orjson

from polar_trl.json_text import load_json
from polar_trl.types import Call, ToolCall
from polar_trl.wire.base import ReplyHead, find_tool
from polar_trl.wire.freeform import render_input
from polar_trl.wire.openai_responses_request import encode_summary
from polar_trl.wire.openai_responses_tools import read_local_shell_action
from polar_trl.wire.sse import render_event

COMPACTION = "compaction"
"""The reply option of a request for a summary."""
# clients keep reasoning only where something is "encrypted"
_SIGNATURE = "cG9sYXItdHJs"


def build_response(head: ReplyHead, status: str, output: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Build a response object, with the fields that the clients' types ask for."""
    response = {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": int(head.created_s),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": head.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": None,
    }
    return response | fields


def build_finished_response(head: ReplyHead, call: Call) -> dict[str, Any]:
    """Build the whole reply. One that ended at its token limit is "incomplete"."""
    output = build_output(head, call)
    if call.completion.finish_reason != "length":
        return build_response(head, "completed", output, usage=_build_usage(head, call))
    details = {"reason": "max_output_tokens"}
    return build_response(head, "incomplete", output, usage=_build_usage(head, call), incomplete_details=details)


def build_compacted_response(head: ReplyHead, call: Call) -> dict[str, Any]:
    """Build the reply of the endpoint that makes summaries (compaction)."""
    return {
        "id": f"resp_{head.id}",
        "object": "response.compaction",
        "created_at": int(head.created_s),
        "output": build_output(head, call),
        "usage": _build_usage(head, call),
    }


def build_output(head: ReplyHead, call: Call) -> list[dict[str, Any]]:
    """Build the items of a reply: reasoning, a message, the tool calls; or a compaction item alone."""
    message = call.message
    if COMPACTION in head.options:
        summary = message.text.strip() or "(no summary was written)"
        return [{"id": f"cmp_{head.id}", "type": "compaction", "encrypted_content": encode_summary(summary)}]
    items: list[dict[str, Any]] = []
    if message.reasoning:
        items.append(build_reasoning(head, message.reasoning))
    if message.text or not (items or message.tool_calls):
        # a reply that says nothing is an item too, so that a client has something to send back
        items.append(build_message(head, message.text))
    for index, tool_call in enumerate(message.tool_calls):
        items.append(_build_call(tool_call, call, f"{head.id}_{index}"))
    if call.completion.finish_reason == "length" and "status" in items[-1]:
        items[-1]["status"] = "incomplete"
    return items


def build_reasoning(head: ReplyHead, text: str) -> dict[str, Any]:
    """Build the item of a reply's reasoning."""
    return {
        "id": f"rs_{head.id}",
        "type": "reasoning",
        "status": "completed",
        "summary": [{"type": "summary_text", "text": text}],
        "encrypted_content": _SIGNATURE,
    }


def build_message(head: ReplyHead, text: str) -> dict[str, Any]:
    """Build the item of a reply's text."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{head.id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _build_call(tool_call: ToolCall, call: Call, item_id: str) -> dict[str, Any]:
    tool = find_tool(call.request, tool_call.name)
    kind = tool.kind if tool else "function"
    names = {"name": tool_call.name}
    if tool and tool.namespace:
        names = {"name": tool_call.name.removeprefix(f"{tool.namespace}__"), "namespace": tool.namespace}
    if kind == "freeform":
        call_id, text = render_input(tool_call)
        return {"id": f"ctc_{item_id}", "type": "custom_tool_call", "call_id": call_id, **names, "input": text}
    base = {"call_id": tool_call.id, "status": "completed"}
    action = _read_action(tool_call.arguments) if kind == "local_shell" else None
    if action is not None:
        return {"id": f"lsh_{item_id}", "type": "local_shell_call", **base, "action": action}
    arguments = tool_call.arguments if tool_call.arguments.strip() else "{}"
    return {"id": f"fc_{item_id}", "type": "function_call", **base, **names, "arguments": arguments}


def _read_action(arguments: str) -> dict[str, Any] | None:
    """Return the action of a local_shell_call; None where it would not carry these arguments unchanged."""
    try:
        value = load_json(arguments)
    except ValueError:
        return None
    if not isinstance(value, dict) or read_local_shell_action(value) != value:
        return None
    return {"type": "exec", "env": {}, **value}


def _build_usage(head: ReplyHead, call: Call) -> dict[str, Any]:
    sampled = len(call.completion.token_ids)
    return {
        "input_tokens": head.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": head.num_prompt_tokens + sampled,
    }


class Events:
    """Writes the events of one stream, numbered.

    Args:
        first: The number of the first one.
    """

    def __init__(self, first: int) -> None:
        self._number = first

    def render(self, kind: str, **fields: Any) -> bytes:
        """Render one event."""
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return render_event(orjson.dumps(event), event=kind)

    def render_item(
        self, item: dict[str, Any], index: int, told: str = "", *, is_whole: bool = True
    ) -> Iterator[bytes]:
        """Render an output item: its beginning, its text in one piece, the whole.

        Args:
            told: The part of its text that was rendered before, with its beginning.
            is_whole: Render its end; otherwise more follows.
        """
        place = {"item_id": item["id"], "output_index": index}
        if not told:
            yield self.render("response.output_item.added", output_index=index, item=_empty(item))
        if item["type"] == "reasoning":
            yield from self._render_reasoning(item, place, told, is_whole)
        elif item["type"] == "message":
            yield from self._render_message(item, place, told, is_whole)
        elif item["type"] == "function_call":
            if item["arguments"]:
                yield self.render("response.function_call_arguments.delta", **place, delta=item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self.render("response.function_call_arguments.done", **place, **done)
        elif item["type"] == "custom_tool_call":
            if item["input"]:
                yield self.render("response.custom_tool_call_input.delta", **place, delta=item["input"])
            yield self.render("response.custom_tool_call_input.done", **place, input=item["input"])
        if is_whole:
            yield self.render("response.output_item.done", output_index=index, item=item)

    def _render_reasoning(
        self, item: dict[str, Any], place: dict[str, Any], told: str, is_whole: bool
    ) -> Iterator[bytes]:
        (part,) = item["summary"]
        place = place | {"summary_index": 0}
        if not told:
            yield self.render("response.reasoning_summary_part.added", **place, part=part | {"text": ""})
        if delta := part["text"][len(told) :]:
            yield self.render("response.reasoning_summary_text.delta", **place, delta=delta)
        if is_whole:
            yield self.render("response.reasoning_summary_text.done", **place, text=part["text"])
            yield self.render("response.reasoning_summary_part.done", **place, part=part)

    def _render_message(
        self, item: dict[str, Any], place: dict[str, Any], told: str, is_whole: bool
    ) -> Iterator[bytes]:
        (part,) = item["content"]
        place = place | {"content_index": 0}
        if not told:
            yield self.render("response.content_part.added", **place, part=part | {"text": ""})
        if delta := part["text"][len(told) :]:
            yield self.render("response.output_text.delta", **place, delta=delta, logprobs=[])
        if is_whole:
            yield self.render("response.output_text.done", **place, text=part["text"], logprobs=[])
            yield self.render("response.content_part.done", **place, part=part)


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    """Build an item as it is before its text came."""
    empty: dict[str, Any] = {"content": [], "summary": [], "arguments": "", "input": "", "status": "in_progress"}
    return item | {key: value for key, value in empty.items() if key in item}
