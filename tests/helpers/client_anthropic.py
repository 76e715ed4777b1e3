"""Talk Messages as the clients of agents do."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from client_base import SIGNATURE, Json, Seen, as_object, read_events, set_fields, whole
from conversations import Style

from polar_trl.types import ChatRequest, Message, Tool, ToolCall, ToolKind
from polar_trl.wire.base import Incoming


class AnthropicClient:
    """Messages."""

    dialect_name = "anthropic"
    raw_arguments = False
    kinds: ClassVar[tuple[ToolKind, ...]] = ("function",)

    def __init__(self, request: ChatRequest, style: Style) -> None:
        self.style = style
        self.messages: list[Json] = []
        messages, system = request.messages, None
        if messages[0].role in ("system", "developer"):
            messages, system = messages[1:], self._blocks(messages[0]) if style.block_lists else messages[0].text
        sampling = request.sampling
        self.body = set_fields(
            {"model": request.model, "stream": request.stream},
            style,
            system=system,
            max_tokens=sampling.max_tokens,
            tools=[self._tool(tool) for tool in request.tools] or None,
            tool_choice=self._choice(request) if request.tools else None,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_sequences=list(sampling.stop) or None,
        )
        if style.unknown_fields:
            self.body |= {"context_management": {"edits": []}, "x_new": "y", "metadata": {"user_id": "{}"}}
        self.add(messages)

    @staticmethod
    def carry(request: ChatRequest) -> ChatRequest:
        """The only role of instructions is "system"."""
        messages = [replace(m, role="system") if m.role == "developer" else m for m in request.messages]
        return replace(request, messages=tuple(messages))

    @property
    def says_ids(self) -> bool:
        return True

    def incoming(self) -> Incoming:
        body = json.dumps(self.body | {"messages": self.messages}).encode()
        headers = {"anthropic-version": "2023-06-01"}
        return Incoming(body=body, path="/v1/messages", query={"beta": "true"}, headers=headers)

    def read(self, reply: bytes, *, streamed: bool) -> Seen:
        message = self._read_stream(reply) if streamed else json.loads(reply)
        assert (message["type"], message["role"]) == ("message", "assistant")
        text, reasoning, calls = "", "", []
        for block in message["content"]:
            if block["type"] == "text":
                text += block["text"]
            elif block["type"] == "thinking":
                assert block["signature"], "an agent may send unsigned thinking back as text"
                reasoning += block["thinking"]
            else:
                assert block["type"] == "tool_use", block
                calls.append(ToolCall(id=block["id"], name=block["name"], arguments=json.dumps(block["input"])))
                if self.style.reserialised:
                    block["input"] = whole(block["input"])
        self.messages.append({"role": "assistant", "content": message["content"]})
        return Seen(text=text, reasoning=reasoning, calls=tuple(calls), stop=message["stop_reason"])

    def _read_stream(self, reply: bytes) -> Json:
        (_, first), *middle, (last_name, last) = read_events(reply)
        message: Json = json.loads(first)["message"]
        assert (message["content"], json.loads(last)["type"], last_name) == ([], "message_stop", "message_stop")
        inputs: dict[int, str] = {}
        for name, data in middle:
            event = json.loads(data)
            assert name == event["type"], "clients pick the event by its name"
            if name == "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            elif name == "content_block_delta":
                self._take_delta(message["content"][event["index"]], event["delta"], inputs, event["index"])
            elif name == "message_delta":
                message |= event["delta"]
        for index, text in inputs.items():
            message["content"][index]["input"] = json.loads(text or "{}")
        return message

    def _take_delta(self, block: Json, delta: Json, inputs: dict[int, str], index: int) -> None:
        if delta["type"] == "input_json_delta":
            assert block["input"] == {}
            inputs[index] = inputs.get(index, "") + delta["partial_json"]
            return
        key = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}[delta["type"]]
        block[key] = block.get(key, "") + delta[key]

    def add(self, messages: Sequence[Message]) -> None:
        results: list[Json] = []
        for message in messages:
            if message.role == "tool":
                content = self._blocks(message) if self.style.block_lists or message.images else message.text
                results.append({"type": "tool_result", "tool_use_id": message.tool_call_id, "content": content})
                continue
            if message.role == "user" and results:
                self.messages.append({"role": "user", "content": results + self._blocks(message)})
                results = []
                continue
            self._flush(results)
            results = []
            self.messages.append(self._message(message))
        self._flush(results)

    def _flush(self, results: list[Json]) -> None:
        if results:
            self.messages.append({"role": "user", "content": results})

    def _message(self, message: Message) -> Json:
        if message.role == "assistant":
            thinking = {"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE}
            blocks: list[Json] = [] if message.reasoning is None else [thinking]
            blocks += [{"type": "text", "text": message.text}] if message.text else []
            for call in message.tool_calls:
                blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": as_object(call)})
            return {"role": "assistant", "content": blocks}
        role = "system" if message.role == "developer" else message.role
        blocks_wanted = self.style.block_lists or message.images
        return {"role": role, "content": self._blocks(message) if blocks_wanted else message.text}

    def _blocks(self, message: Message) -> list[Json]:
        marker = {"cache_control": {"type": "ephemeral"}} if self.style.unknown_fields else {}
        return [{"type": "text", "text": message.text} | marker, *map(self._image, message.images)]

    def _image(self, url: str) -> Json:
        if not url.startswith("data:"):
            return {"type": "image", "source": {"type": "url", "url": url}}
        media_type, data = url.removeprefix("data:").split(";base64,")
        return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}

    def _tool(self, tool: Tool) -> Json:
        return {"name": tool.name, "description": tool.description, "input_schema": dict(tool.parameters)}

    def _choice(self, request: ChatRequest) -> Json:
        if request.tool_choice in ("auto", "none", "required"):
            return {"type": "any" if request.tool_choice == "required" else request.tool_choice}
        return {"type": "tool", "name": request.tool_choice}
