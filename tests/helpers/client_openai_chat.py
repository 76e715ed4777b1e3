"""Talk Chat Completions as the clients of agents do."""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from client_base import Json, Seen, halves, read_events, respell, set_fields
from conversations import Style

from polar_trl.types import ChatRequest, Message, Tool, ToolCall, ToolKind
from polar_trl.wire.base import Incoming


class ChatClient:
    """Chat Completions."""

    dialect_name = "openai_chat"
    raw_arguments = True
    kinds: ClassVar[tuple[ToolKind, ...]] = ("function", "freeform")

    def __init__(self, request: ChatRequest, style: Style) -> None:
        self.style = style
        self.tools = {tool.name: tool for tool in request.tools}
        sampling = request.sampling
        self.messages: list[Json] = []
        self.body = set_fields(
            {"model": request.model, "stream": request.stream},
            style,
            tools=[self._tool(tool) for tool in request.tools] or None,
            tool_choice=self._choice(request) if request.tools else None,
            max_completion_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop=list(sampling.stop) or None,
        )
        if style.unknown_fields:
            self.body |= {"store": False, "x_new": {"deep": [1]}}
        self.add(request.messages)

    @staticmethod
    def carry(request: ChatRequest) -> ChatRequest:
        return request

    @property
    def says_ids(self) -> bool:
        return True

    def incoming(self) -> Incoming:
        body = json.dumps(self.body | {"messages": self.messages}).encode()
        return Incoming(body=body, path="/v1/chat/completions")

    def read(self, reply: bytes, *, streamed: bool) -> Seen:
        message, stop = self._read_stream(reply) if streamed else self._read_plain(reply)
        calls = []
        for call in message.get("tool_calls", ()):
            if call["type"] == "custom":
                custom = call["custom"]
                arguments = json.dumps({"input": custom["input"]})
                calls.append(ToolCall(id=call["id"], name=custom["name"], arguments=arguments))
                continue
            assert call["type"] == "function"
            function = call["function"]
            calls.append(ToolCall(id=call["id"], name=function["name"], arguments=function["arguments"]))
            if self.style.reserialised:
                function["arguments"] = respell(function["arguments"])
        self.messages.append(message)
        return Seen(
            text=message["content"] or "",
            reasoning=message.get("reasoning_content", ""),
            calls=tuple(calls),
            stop=stop,
        )

    def _read_plain(self, reply: bytes) -> tuple[Json, str]:
        (choice,) = json.loads(reply)["choices"]
        return choice["message"], choice["finish_reason"]

    def _read_stream(self, reply: bytes) -> tuple[Json, str]:
        *events, done = [data for _, data in read_events(reply)]
        assert done == "[DONE]"
        message: Json = {"content": ""}
        calls: dict[int, Json] = {}
        stop = None
        for choice in (choice for event in events for choice in json.loads(event)["choices"]):
            assert stop is None, "a delta after the finish reason"
            stop = choice["finish_reason"]
            for key, value in choice["delta"].items():
                if key == "tool_calls":
                    for part in value:
                        assert part["index"] not in calls
                        calls[part["index"]] = {key: part[key] for key in ("id", "type", part["type"])}
                elif key == "role":
                    message["role"] = value
                else:
                    message[key] = message.get(key, "") + value
        if calls:
            message["tool_calls"] = [calls[index] for index in range(len(calls))]
        assert stop is not None
        return message, stop

    def add(self, messages: Sequence[Message]) -> None:
        self.messages += map(self._message, messages)

    def _message(self, message: Message) -> Json:
        result: Json = {"role": message.role, "content": self._content(message)}
        if message.role == "tool":
            return result | {"tool_call_id": message.tool_call_id}
        if message.reasoning is not None:
            result["reasoning" if self.style.nulls else "reasoning_content"] = message.reasoning
        if message.tool_calls:
            result["content"] = message.text or None
            result["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return result

    def _call(self, call: ToolCall) -> Json:
        if call.name in self.tools and self.tools[call.name].kind == "freeform":
            custom = {"name": call.name, "input": json.loads(call.arguments)["input"]}
            return {"id": call.id, "type": "custom", "custom": custom}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _content(self, message: Message) -> Any:
        if not message.images and not self.style.block_lists:
            return message.text
        parts: list[Json] = [{"type": "text", "text": text} for text in halves(message.text)]
        return parts + [{"type": "image_url", "image_url": {"url": url}} for url in message.images]

    def _tool(self, tool: Tool) -> Json:
        if tool.kind == "freeform":
            grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}}
            custom = {"name": tool.name, "description": tool.description, "format": grammar}
            return {"type": "custom", "custom": custom}
        function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
        return {"type": "function", "function": function}

    def _choice(self, request: ChatRequest) -> Any:
        if request.tool_choice in ("auto", "none", "required"):
            return request.tool_choice
        return {"type": "function", "function": {"name": request.tool_choice}}
