"""Put the providers' own Python clients behind one small face: ask, answer tools, count, list, break off.

What they accept and how they put a stream together is the measure of a dialect; nothing here reads an event.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import anthropic
import httpx
import openai
from google import genai
from google.genai import errors as google_errors
from google.genai import types as google_types

from polar_trl.types import Endpoint

Json = dict[str, Any]
_LAST_EVENTS = ("response.completed", "response.incomplete")
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A reply as the client read it."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str, Json], ...]
    """Id, name and arguments."""
    stop: str
    num_prompt_tokens: int
    num_sampled_tokens: int


class Sdk(Protocol):
    """One conversation of one client. The first message is the user's "hello"."""

    dialect: ClassVar[str]
    error_class: ClassVar[type[Exception]]
    lost_class: ClassVar[type[Exception] | None]
    """What it raises where a connection is lost under a request; None: it asks again by itself."""

    def __init__(self, endpoint: Endpoint, *, attempts: int = 1, text: str = "hello") -> None: ...

    def ask(self, *, stream: bool = False, tools: bool = False, **options: Any) -> Answer:
        """Options: `stop` (a sequence), `max_tokens`, `wrong` (fields to send as they are)."""
        ...

    def say(self, text: str) -> None: ...

    def give_results(self, results: list[tuple[str, str, str]]) -> None:
        """Id and name of the call, and the result's text; all of one reply."""
        ...

    def count(self) -> int: ...

    def list_models(self) -> list[str]: ...

    def open_stream(self) -> "contextmanager[None]":
        """Inside, a stream has begun; its end hangs up."""
        ...

    @staticmethod
    def explain(error: Any) -> tuple[int, str, str]:
        """HTTP status, the provider's name of the error, and the message."""
        ...


class ChatSdk:
    """`openai`, Chat Completions."""

    dialect = "openai_chat"
    error_class = openai.APIStatusError
    lost_class = None

    def __init__(self, endpoint: Endpoint, *, attempts: int = 1, text: str = "hello") -> None:
        self.client = openai.OpenAI(
            base_url=f"{endpoint.origin}/v1", api_key=endpoint.api_key, timeout=20, max_retries=attempts - 1
        )
        self.messages: list[Any] = [{"role": "user", "content": text}]

    def ask(self, *, stream: bool = False, tools: bool = False, **options: Any) -> Answer:
        fields = self._fields(tools, **options)
        completion = self._read_stream(fields) if stream else self.client.chat.completions.create(**fields)
        (choice,) = completion.choices
        self.messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        return Answer(
            text=choice.message.content or "",
            reasoning=getattr(choice.message, "reasoning_content", None) or "",
            calls=tuple((id, name, json.loads(arguments)) for id, name, arguments in calls),
            stop=choice.finish_reason,
            num_prompt_tokens=completion.usage.prompt_tokens,
            num_sampled_tokens=completion.usage.completion_tokens,
        )

    def _read_stream(self, fields: Json) -> Any:
        with self.client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as events:
            try:
                return events.get_final_completion()
            except openai.LengthFinishReasonError as error:  # this helper's way to say "length"
                return error.completion

    def _fields(self, tools: bool, stop: str = "", max_tokens: int = 0, wrong: Json | None = None) -> Json:
        fields: Json = {"model": "m", "messages": self.messages}
        if tools:
            function = {"name": "sh", "description": "run", "parameters": SCHEMA}
            fields["tools"] = [{"type": "function", "function": function}]
        fields |= {"stop": [stop]} if stop else {}
        fields |= {"max_completion_tokens": max_tokens} if max_tokens else {}
        return fields | ({"extra_body": wrong} if wrong else {})

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def give_results(self, results: list[tuple[str, str, str]]) -> None:
        self.messages += [{"role": "tool", "tool_call_id": id, "content": text} for id, _, text in results]

    def count(self) -> int:
        raise NotImplementedError("Chat Completions counts nothing")

    def list_models(self) -> list[str]:
        return [model.id for model in self.client.models.list()]

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        with self.client.chat.completions.create(**self._fields(False), stream=True):
            yield

    @staticmethod
    def explain(error: Any) -> tuple[int, str, str]:
        return error.status_code, error.code or error.type, error.body["message"]


class ResponsesSdk(ChatSdk):
    """`openai`, Responses."""

    dialect = "openai_responses"

    def ask(self, *, stream: bool = False, tools: bool = False, **options: Any) -> Answer:
        fields = self._fields(tools, **options)
        if stream:
            with self.client.responses.stream(**fields) as events:
                # `get_final_response` knows no incomplete one
                finals = [event.response for event in events if event.type in _LAST_EVENTS]
            response: Any = finals[-1]
        else:
            response = self.client.responses.create(**fields)
        self.messages += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        reasonings = [item for item in response.output if item.type == "reasoning"]
        calls = [item for item in response.output if item.type == "function_call"]
        incomplete = response.incomplete_details
        return Answer(
            text=response.output_text,
            reasoning="".join(part.text for item in reasonings for part in item.content or item.summary),
            calls=tuple((item.call_id, item.name, json.loads(item.arguments)) for item in calls),
            stop=incomplete.reason if incomplete else response.status,
            num_prompt_tokens=response.usage.input_tokens,
            num_sampled_tokens=response.usage.output_tokens,
        )

    def _fields(self, tools: bool, stop: str = "", max_tokens: int = 0, wrong: Json | None = None) -> Json:
        assert not stop, "Responses has no stop sequences"
        fields: Json = {"model": "m", "input": self.messages, "store": False}
        if tools:
            fields["tools"] = [{"type": "function", "name": "sh", "description": "run", "parameters": SCHEMA}]
        fields |= {"max_output_tokens": max_tokens} if max_tokens else {}
        return fields | ({"extra_body": wrong} if wrong else {})

    def give_results(self, results: list[tuple[str, str, str]]) -> None:
        self.messages += [{"type": "function_call_output", "call_id": id, "output": text} for id, _, text in results]

    def count(self) -> int:
        return self.client.responses.input_tokens.count(model="m", input=self.messages).input_tokens

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        with self.client.responses.create(**self._fields(False), stream=True):
            yield


class AnthropicSdk:
    """`anthropic`, Messages."""

    dialect = "anthropic"
    error_class = anthropic.APIStatusError
    lost_class = None

    def __init__(self, endpoint: Endpoint, *, attempts: int = 1, text: str = "hello") -> None:
        self.client = anthropic.Anthropic(
            base_url=endpoint.origin, api_key=endpoint.api_key, timeout=20, max_retries=attempts - 1
        )
        self.messages: list[Any] = [{"role": "user", "content": text}]

    def ask(self, *, stream: bool = False, tools: bool = False, **options: Any) -> Answer:
        fields = self._fields(tools, **options)
        if stream:
            with self.client.messages.stream(**fields) as events:
                message: Any = events.get_final_message()
        else:
            message = self.client.messages.create(**fields)
        self.messages.append({"role": "assistant", "content": message.content})
        blocks = {kind: [block for block in message.content if block.type == kind] for kind in ("text", "thinking")}
        calls = [block for block in message.content if block.type == "tool_use"]
        return Answer(
            text="".join(block.text for block in blocks["text"]),
            reasoning="".join(block.thinking for block in blocks["thinking"]),
            calls=tuple((block.id, block.name, block.input) for block in calls),
            stop=message.stop_reason if not message.stop_sequence else f"stop_sequence {message.stop_sequence}",
            num_prompt_tokens=message.usage.input_tokens,
            num_sampled_tokens=message.usage.output_tokens,
        )

    def _fields(self, tools: bool, stop: str = "", max_tokens: int = 0, wrong: Json | None = None) -> Json:
        fields: Json = {"model": "m", "messages": self.messages, "max_tokens": max_tokens or 1000}
        if tools:
            fields["tools"] = [{"name": "sh", "description": "run", "input_schema": SCHEMA}]
        fields |= {"stop_sequences": [stop]} if stop else {}
        return fields | ({"extra_body": wrong} if wrong else {})

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def give_results(self, results: list[tuple[str, str, str]]) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, _, text in results]
        self.messages.append({"role": "user", "content": blocks})

    def count(self) -> int:
        return self.client.messages.count_tokens(model="m", messages=self.messages).input_tokens

    def list_models(self) -> list[str]:
        return [model.id for model in self.client.models.list()]

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        with self.client.messages.create(**self._fields(False), stream=True):
            yield

    @staticmethod
    def explain(error: Any) -> tuple[int, str, str]:
        return error.status_code, error.body["error"]["type"], error.body["error"]["message"]


class GoogleSdk:
    """`google-genai`, generateContent."""

    dialect = "google"
    error_class = google_errors.APIError
    lost_class = httpx.RemoteProtocolError

    def __init__(self, endpoint: Endpoint, *, attempts: int = 1, text: str = "hello") -> None:
        retry = google_types.HttpRetryOptions(attempts=attempts, initial_delay=0.05, max_delay=0.1, jitter=0.01)
        options = google_types.HttpOptions(base_url=endpoint.origin, timeout=20_000, retry_options=retry)
        self.client = genai.Client(api_key=endpoint.api_key, vertexai=False, http_options=options)
        self.contents: list[Any] = [google_types.Content(role="user", parts=[google_types.Part(text=text)])]

    def ask(self, *, stream: bool = False, tools: bool = False, **options: Any) -> Answer:
        fields = self._fields(tools, **options)
        if stream:
            replies: list[Any] = list(self.client.models.generate_content_stream(**fields))
        else:
            replies = [self.client.models.generate_content(**fields)]
        parts = [part for reply in replies for part in reply.candidates[0].content.parts or ()]
        self.contents.append(google_types.Content(role="model", parts=parts))
        calls = [part.function_call for part in parts if part.function_call]
        usage, reason = replies[-1].usage_metadata, replies[-1].candidates[0].finish_reason
        return Answer(
            text="".join(part.text for part in parts if part.text and not part.thought),
            reasoning="".join(part.text for part in parts if part.text and part.thought),
            calls=tuple((call.id, call.name, call.args) for call in calls),
            stop=reason.value,
            num_prompt_tokens=usage.prompt_token_count,
            num_sampled_tokens=usage.candidates_token_count,
        )

    def _fields(self, tools: bool, stop: str = "", max_tokens: int = 0, wrong: Json | None = None) -> Json:
        config: Json = {}
        if tools:
            function = {"name": "sh", "description": "run", "parameters_json_schema": SCHEMA}
            config["tools"] = [{"function_declarations": [function]}]
        config |= {"stop_sequences": [stop]} if stop else {}
        config |= {"max_output_tokens": max_tokens} if max_tokens else {}
        config |= {"http_options": {"extra_body": {"generationConfig": wrong}}} if wrong else {}
        return {"model": "m", "contents": self.contents, "config": config}

    def say(self, text: str) -> None:
        self.contents.append(google_types.Content(role="user", parts=[google_types.Part(text=text)]))

    def give_results(self, results: list[tuple[str, str, str]]) -> None:
        parts = [
            google_types.Part(
                function_response=google_types.FunctionResponse(id=id, name=name, response={"output": text})
            )
            for id, name, text in results
        ]
        self.contents.append(google_types.Content(role="user", parts=parts))

    def count(self) -> int:
        total = self.client.models.count_tokens(model="m", contents=self.contents).total_tokens
        assert total is not None
        return total

    def list_models(self) -> list[str]:
        return [(model.name or "").removeprefix("models/") for model in self.client.models.list()]

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        stream = self.client.models.generate_content_stream(**self._fields(False))
        next(stream)  # it asks only now; what comes is a ping
        yield
        stream.close()

    @staticmethod
    def explain(error: Any) -> tuple[int, str, str]:
        return error.code, error.status, error.message


SDKS: dict[str, type[Sdk]] = {sdk.dialect: sdk for sdk in (ChatSdk, ResponsesSdk, AnthropicSdk, GoogleSdk)}
