"""Stand in for vLLM's server: token ids or messages in, sampled ids with log-probabilities out.

Two of them. `PolicyServer` (table A) renders messages with the chat template, parses replies, and is asked by the
peers for what the policy says. `ConstantServer` (table B) answers every request at once with the same reply, after as
many prompt ids as vLLM would give, each prompt's going on from the one before, and does nothing else.
"""

import asyncio
import itertools
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from peers.policy import CONSTANT_ARGUMENTS, CONSTANT_TEXT, Policy

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_numbers = itertools.count()


def parse_reply(text: str, parser: str) -> dict[str, Any]:
    """Parse a reply into a message: parser "vllm" keeps the white space before a tool call, "tidy" strips all."""
    message: dict[str, Any] = {"role": "assistant"}
    if "</think>" in text:
        thought, _, text = text.partition("</think>")
        thought = thought.partition("<think>")[2]
        message["reasoning_content"] = thought.strip() if parser == "tidy" else thought
    content = text.partition("<tool_call>")[0]
    message["content"] = (content.strip() if parser == "tidy" else content) or None
    calls = [json.loads(found) for found in _CALL.findall(text)]
    if calls:
        message["tool_calls"] = [
            build_tool_call(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in calls
        ]
    return message


def build_tool_call(name: str, arguments: str) -> dict[str, Any]:
    call_id = f"chatcmpl-tool-{next(_numbers):08x}"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def build_choice(ids: list[int], logprobs: list[float], finish_reason: str) -> dict[str, Any]:
    entries = [
        {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token_id, logprob in zip(ids, logprobs, strict=True)
    ]
    return {"index": 0, "token_ids": ids, "logprobs": {"content": entries}, "finish_reason": finish_reason}


class PolicyServer:
    """vLLM's two endpoints over the scripted policy: `/PARSER/v1/chat/completions`, `/inference/v1/generate`."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one request, as vLLM 0.31 does."""
        if path.endswith("/generate"):
            sample, finish_reason = self.policy.sample(body["token_ids"])
            choice = build_choice(list(sample.token_ids), list(sample.logprobs), finish_reason)
            return {"request_id": "r", "choices": [choice]}
        prompt_ids = self._render(body["messages"], body.get("tools"))
        sample, finish_reason = self.policy.sample(prompt_ids)
        text = self.policy.tokenizer.decode(sample.token_ids).removesuffix("<|im_end|>")
        message = parse_reply(text, path.split("/")[1])
        if "tool_calls" in message:
            finish_reason = "tool_calls"
        choice = build_choice(list(sample.token_ids), list(sample.logprobs), finish_reason)
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "prompt_token_ids": prompt_ids,
            "choices": [{**choice, "message": message}],
            "usage": {"prompt_tokens": len(prompt_ids), "completion_tokens": len(sample.token_ids), "total_tokens": 0},
        }

    def _render(self, messages: list[dict[str, Any]], tools: Any) -> list[int]:
        rendered = []
        for message in messages:
            copy = dict(message)
            if "reasoning" in copy:
                copy["reasoning_content"] = copy.pop("reasoning")
            calls = [call["function"] for call in copy.get("tool_calls") or []]
            if calls:
                copy["tool_calls"] = [
                    {"function": {**call, "arguments": json.loads(call["arguments"])}} for call in calls
                ]
            rendered.append(copy)
        tokenizer = self.policy.tokenizer
        text = tokenizer.apply_chat_template(rendered, tools=tools, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    def __enter__(self) -> Self:
        answer = self.answer

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send({"object": "list", "data": [{"id": "policy", "object": "model", "max_model_len": 1 << 20}]})

            def do_POST(self) -> None:
                self._send(answer(self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))

            def _send(self, value: dict[str, Any]) -> None:
                text = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.origin = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class ConstantServer:
    """Answers each request with the constant reply, from a thread of this process."""

    def __init__(self, reply_ids: list[int]) -> None:
        choice = build_choice(reply_ids, [-0.5] * len(reply_ids), "tool_calls")
        message = {"role": "assistant", "content": CONSTANT_TEXT}
        call = build_tool_call("bash", CONSTANT_ARGUMENTS)
        call["id"] = "CALL_ID"
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "policy"}
        usage = {"prompt_tokens": 1, "completion_tokens": len(reply_ids), "total_tokens": 1}
        chat = {**head, "usage": usage, "choices": [{**choice, "message": {**message, "tool_calls": [call]}}]}
        self._chat = json.dumps(chat)[:-1]
        bare = {"index": 0, "message": {**message, "tool_calls": [call]}, "finish_reason": "tool_calls"}
        self._bare = json.dumps({**head, "usage": usage, "choices": [bare]})
        generated = build_choice(reply_ids, [-0.5] * len(reply_ids), "stop")
        self._generated = json.dumps({"request_id": "r", "choices": [generated]})
        self._reply_ids = "".join(f"{token_id}," for token_id in reply_ids)
        self._prompts: dict[bytes, tuple[str, int]] = {}
        """The id of a session's first tool call -> its next prompt begins with these ids, for so many bytes."""
        self._models = json.dumps({"object": "list", "data": [{"id": "policy", "max_model_len": 1 << 20}]})
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        opened = asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 22)
        server = asyncio.run_coroutine_threadsafe(opened, self._loop).result()
        self.origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                found = re.search(r"content-length: *(\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(found[1])) if found else b""
                text = self._choose(head.split(" ")[1], body).encode()
                size = len(text)
                start = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"
                writer.write(start.encode() + text)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _choose(self, path: str, body: bytes) -> str:
        if not body:
            return self._models
        if path.endswith("/generate"):
            return self._generated
        if b"return_token_ids" not in body:
            return self._bare.replace("CALL_ID", f"call_{next(_numbers):08x}")
        call_id = f"call_{next(_numbers):08x}"
        first = re.search(rb"call_[0-9a-f]{8}", body)
        ids, num_bytes = self._prompts.get(first[0], ("", 0)) if first else ("", 0)
        # a token per four bytes, as long text has with this tokenizer
        ids += "12345," * max(1, (len(body) - num_bytes) // 4)
        self._prompts[first[0] if first else call_id.encode()] = (ids + self._reply_ids, len(body))
        chat = self._chat.replace("CALL_ID", call_id)
        return f'{chat},"prompt_token_ids":[{ids[:-1]}]}}'
