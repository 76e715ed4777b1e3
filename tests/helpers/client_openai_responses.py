"""Talk Responses as the clients of agents do."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from client_base import SIGNATURE, Json, Seen, halves, read_events, respell, set_fields
from conversations import Style

from polar_trl.types import ChatRequest, Message, Tool, ToolCall, ToolKind
from polar_trl.wire.base import Incoming


class ResponsesClient:
    """Responses, without a server that remembers: the whole conversation goes with each request."""

    dialect_name = "openai_responses"
    raw_arguments = True
    kinds: ClassVar[tuple[ToolKind, ...]] = ("function", "freeform", "local_shell")

    def __init__(self, request: ChatRequest, style: Style) -> None:
        self.style = style
        self.tools = {tool.name: tool for tool in request.tools}
        self.call_kinds: dict[str, ToolKind] = {}
        self.items: list[Json] = []
        messages, instructions = request.messages, None
        if messages[0].role == "system" and not style.block_lists:
            messages, instructions = messages[1:], messages[0].text
        self.body = set_fields(
            {"model": request.model, "stream": request.stream, "store": False},
            style,
            instructions=instructions,
            tools=[self._tool(tool) for tool in request.tools] or None,
            tool_choice=self._choice(request) if request.tools else None,
            max_output_tokens=request.sampling.max_tokens,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            include=["reasoning.encrypted_content"],
        )
        if style.unknown_fields:
            self.body |= {"client_metadata": {"a": "b"}, "x_new": [{}]}
        self.add(messages)

    @staticmethod
    def carry(request: ChatRequest) -> ChatRequest:
        """No stop sequences, no top_k; an empty reasoning is none."""
        sampling = replace(request.sampling, stop=(), top_k=None)
        return replace(request, sampling=sampling)

    @property
    def says_ids(self) -> bool:
        return True

    def incoming(self) -> Incoming:
        body = json.dumps(self.body | {"input": self.items}).encode()
        return Incoming(body=body, path="/v1/responses")

    def read(self, reply: bytes, *, streamed: bool) -> Seen:
        response = self._read_stream(reply) if streamed else json.loads(reply)
        texts, reasonings, calls = [], [], []
        for item in response["output"]:
            if item["type"] == "message":
                assert item["role"] == "assistant"
                texts += [part["text"] for part in item["content"] if part["type"] == "output_text"]
            elif item["type"] == "reasoning":
                assert item["encrypted_content"], "an agent may drop reasoning that is not signed"
                reasonings += [part["text"] for part in item.get("content") or item["summary"]]
            else:
                calls.append(self._read_call(item))
                if item["type"] == "function_call" and self.style.reserialised:
                    item = item | {"arguments": respell(item["arguments"])}
            sent = {key: value for key, value in item.items() if self.style.with_ids or key not in ("id", "status")}
            self.items.append(sent)
        stop = (response.get("incomplete_details") or {}).get("reason") or response["status"]
        return Seen(text="".join(texts), reasoning="".join(reasonings), calls=tuple(calls), stop=stop)

    def _read_call(self, item: Json) -> ToolCall:
        name = item.get("name", "local_shell")
        if item.get("namespace"):
            name = f"{item['namespace']}__{name}"
        if item["type"] == "function_call":
            kind, arguments = "function", item["arguments"]
        elif item["type"] == "custom_tool_call":
            kind, arguments = "freeform", json.dumps({"input": item["input"]})
        else:
            assert item["type"] == "local_shell_call", item
            assert item["action"]["type"] == "exec"
            kind, arguments = "local_shell", json.dumps({"command": item["action"]["command"]})
        self.call_kinds[item["call_id"]] = kind  # type: ignore[assignment]
        return ToolCall(id=item["call_id"], name=name, arguments=arguments)

    def _read_stream(self, reply: bytes) -> Json:
        items: dict[int, Json] = {}
        added: set[int] = set()
        deltas: dict[str, str] = {}
        final: Json = {}
        events = [event for event in read_events(reply) if event[0] != "keepalive"]  # the ping knows no number
        for number, (name, data) in enumerate(events):
            event = json.loads(data)
            assert (event["type"], event["sequence_number"]) == (name, number)
            assert not final, "an event after the last"
            if name == "response.output_item.added":
                added.add(event["output_index"])
            elif name == "response.output_item.done":
                assert event["output_index"] in added
                items[event["output_index"]] = event["item"]
            elif name.endswith(".delta"):
                deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
            elif name in ("response.completed", "response.incomplete"):
                final = event["response"]
        output = [items[index] for index in range(len(items))]
        assert output == final["output"]
        for item in output:
            said = item.get("arguments", item.get("input")) or "".join(
                part["text"] for part in item.get("content") or item.get("summary") or ()
            )
            assert deltas.get(item["id"], said) == said
        return final

    def add(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.role == "assistant":
                self.items += self._assistant(message)
            elif message.role == "tool":
                self.items.append(self._result(message))
            else:
                self.items.append({"type": "message", "role": message.role, "content": self._content(message)})

    def _assistant(self, message: Message) -> list[Json]:
        items: list[Json] = []
        if message.reasoning is not None:
            summary = [{"type": "summary_text", "text": text} for text in halves(message.reasoning)]
            items.append({"type": "reasoning", "summary": summary, "encrypted_content": SIGNATURE})
        if message.text or (not items and not message.tool_calls):
            content = [{"type": "output_text", "text": text, "annotations": []} for text in halves(message.text)]
            items.append({"type": "message", "role": "assistant", "content": content})
        for call in message.tool_calls:
            items.append(self._call(call))
        return items

    def _call(self, call: ToolCall) -> Json:
        tool = self.tools.get(call.name)
        kind = self.call_kinds[call.id] = tool.kind if tool else "function"
        if kind == "freeform":
            text = json.loads(call.arguments)["input"]
            return {"type": "custom_tool_call", "call_id": call.id, "name": call.name, "input": text}
        if kind == "local_shell":
            action = {"type": "exec", "command": json.loads(call.arguments)["command"], "env": {}}
            return {"type": "local_shell_call", "call_id": call.id, "status": "completed", "action": action}
        names = {"name": call.name}
        if tool and tool.namespace:
            names = {"name": call.name.removeprefix(f"{tool.namespace}__"), "namespace": tool.namespace}
        return {"type": "function_call", "call_id": call.id, **names, "arguments": call.arguments}

    def _result(self, message: Message) -> Json:
        kinds = {"function": "function_call", "freeform": "custom_tool_call", "local_shell": "local_shell_call"}
        assert message.tool_call_id is not None
        kind = kinds[self.call_kinds[message.tool_call_id]]
        return {"type": f"{kind}_output", "call_id": message.tool_call_id, "output": self._content(message)}

    def _content(self, message: Message) -> Any:
        if not message.images and not self.style.block_lists:
            return message.text
        parts: list[Json] = [{"type": "input_text", "text": text} for text in halves(message.text)]
        return parts + [{"type": "input_image", "image_url": url, "detail": "auto"} for url in message.images]

    def _tool(self, tool: Tool) -> Json:
        if tool.kind == "local_shell":
            return {"type": "local_shell"}
        if tool.kind == "freeform":
            grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
            return {"type": "custom", "name": tool.name, "description": tool.description, "format": grammar}
        name = tool.name.removeprefix(f"{tool.namespace}__") if tool.namespace else tool.name
        function = {"type": "function", "name": name, "description": tool.description}
        function["parameters"] = dict(tool.parameters)
        return {"type": "namespace", "name": tool.namespace, "tools": [function]} if tool.namespace else function

    def _choice(self, request: ChatRequest) -> Any:
        if request.tool_choice in ("auto", "none", "required"):
            return request.tool_choice
        tool = self.tools[request.tool_choice]
        if tool.namespace:
            return {
                "type": "function",
                "name": tool.name.removeprefix(f"{tool.namespace}__"),
                "namespace": tool.namespace,
            }
        return {"type": "function", "name": request.tool_choice}
