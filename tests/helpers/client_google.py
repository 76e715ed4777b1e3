"""Talk generateContent as the clients of agents do."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from client_base import SIGNATURE, Json, Seen, as_object, halves, read_events, set_fields
from conversations import Style

from polar_trl.types import ChatRequest, Message, Tool, ToolCall, ToolKind
from polar_trl.wire.base import Incoming


class GoogleClient:
    """generateContent and streamGenerateContent."""

    dialect_name = "google"
    raw_arguments = False
    kinds: ClassVar[tuple[ToolKind, ...]] = ("function",)

    def __init__(self, request: ChatRequest, style: Style) -> None:
        self.style = style
        self.contents: list[Json] = []
        self.call_names: dict[str, str] = {}
        self.request = request
        messages, instruction = request.messages, None
        if messages[0].role in ("system", "developer"):
            messages, instruction = messages[1:], {"parts": [{"text": text} for text in halves(messages[0].text)]}
        sampling = request.sampling
        config = set_fields(
            {},
            style,
            maxOutputTokens=sampling.max_tokens,
            temperature=sampling.temperature,
            topP=sampling.top_p,
            topK=sampling.top_k,
            stopSequences=list(sampling.stop) or None,
        )
        tools = [{"functionDeclarations": [self._tool(tool) for tool in request.tools]}]
        self.body = set_fields(
            {"generationConfig": config},
            style,
            systemInstruction=instruction,
            tools=tools if request.tools else None,
            toolConfig=self._choice(request) if request.tools else None,
        )
        if style.unknown_fields:
            self.body |= {"safetySettings": [], "xNew": {"a": 1}}
        self.add(messages)

    @staticmethod
    def carry(request: ChatRequest) -> ChatRequest:
        """Only the first message can be an instruction: later ones are sent as the user's."""
        first, *rest = request.messages
        first = replace(first, role="system") if first.role == "developer" else first
        rest = [replace(m, role="user") if m.role in ("system", "developer") else m for m in rest]
        return replace(request, messages=(first, *rest))

    @property
    def says_ids(self) -> bool:
        return self.style.with_ids

    def incoming(self) -> Incoming:
        method = "streamGenerateContent" if self.request.stream else "generateContent"
        target = f"{self.request.model}:{method}"
        return Incoming(
            body=json.dumps(self.body | {"contents": self.contents}).encode(),
            path=f"/v1beta/models/{target}",
            path_params={"model": self.request.model},
            query={"alt": "sse"} if self.request.stream else {},
        )

    def read(self, reply: bytes, *, streamed: bool) -> Seen:
        chunks = [json.loads(data) for _, data in read_events(reply)] if streamed else [json.loads(reply)]
        text, reasoning, calls, parts, stop = "", "", [], [], ""
        for candidate in (candidate for chunk in chunks for candidate in chunk.get("candidates", ())):
            stop = candidate.get("finishReason", stop)
            for part in candidate.get("content", {}).get("parts", ()):
                if "functionCall" in part:
                    call = part["functionCall"]
                    calls.append(self._read_call(call))
                    kept = {key: value for key, value in call.items() if key != "id" or self.style.with_ids}
                    parts.append(part | {"functionCall": kept})
                elif part.get("thought"):
                    reasoning += part["text"]
                    if not self.style.reserialised:  # Gemini CLI 0.61.0 drops thoughts
                        parts.append(part)
                else:
                    text += part.get("text", "")
                    parts.append(part)
        assert stop
        self.contents.append({"role": "model", "parts": parts})
        return Seen(text=text, reasoning=reasoning, calls=tuple(calls), stop=stop)

    def _read_call(self, call: Json) -> ToolCall:
        self.call_names[call["id"]] = call["name"]
        return ToolCall(id=call["id"], name=call["name"], arguments=json.dumps(call.get("args", {})))

    def add(self, messages: Sequence[Message]) -> None:
        results: list[Json] = []
        for message in messages:
            if message.role == "tool":
                results += self._result(message)
                continue
            self._flush(results)
            results = []
            parts = self._assistant(message) if message.role == "assistant" else self._parts(message)
            self.contents.append({"role": "model" if message.role == "assistant" else "user", "parts": parts})
        self._flush(results)

    def _flush(self, results: list[Json]) -> None:
        if results:
            self.contents.append({"role": "user", "parts": results})

    def _assistant(self, message: Message) -> list[Json]:
        parts: list[Json] = []
        if message.reasoning is not None:
            parts.append({"text": message.reasoning, "thought": True, "thoughtSignature": SIGNATURE})
        parts += [{"text": text} for text in halves(message.text)] if message.text else []
        for call in message.tool_calls:
            self.call_names[call.id] = call.name
            part = {"name": call.name, "args": as_object(call)} | ({"id": call.id} if self.style.with_ids else {})
            parts.append({"functionCall": part})
        return parts

    def _result(self, message: Message) -> list[Json]:
        assert message.tool_call_id is not None
        response = {"name": self.call_names[message.tool_call_id], "response": {"output": message.text}}
        named = {"id": message.tool_call_id} if self.style.with_ids else {}
        images = {"parts": list(map(self._image, message.images))} if message.images else {}
        return [{"functionResponse": named | response | images}]

    def _parts(self, message: Message) -> list[Json]:
        return [{"text": text} for text in halves(message.text)] + list(map(self._image, message.images))

    def _image(self, url: str) -> Json:
        if not url.startswith("data:"):
            return {"fileData": {"fileUri": url, "mimeType": "image/png"}}
        media_type, data = url.removeprefix("data:").split(";base64,")
        return {"inlineData": {"mimeType": media_type, "data": data}}

    def _tool(self, tool: Tool) -> Json:
        return {"name": tool.name, "description": tool.description, "parametersJsonSchema": dict(tool.parameters)}

    def _choice(self, request: ChatRequest) -> Json:
        modes = {"auto": "AUTO", "none": "NONE", "required": "ANY"}
        choice = request.tool_choice
        named = {"mode": "ANY", "allowedFunctionNames": [choice]}
        return {"functionCallingConfig": {"mode": modes[choice]} if choice in modes else named}
