#!/usr/bin/env python3
"""Do to a history what agents do to theirs: a title on the side, a sub-agent, a compaction, a second turn.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=key python3 -I -S demo_agent.py "Fix the pager"

For scripts/dev/make_demo_run.py, whose scripted model answers it. Standard library only. At most 40 calls.
"""

import http.client
import json
import os
import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit

SYSTEM = """You are a careful software engineer who works in a Linux folder.

Look before you change something, keep changes small, and run the tests before you say that you are done. You have a
shell, and a helper that searches code and reports what it finds. Answer the user in one or two sentences."""
SEARCHER = "You search code. Use the shell to look, change nothing, and report what you found in one sentence."
TITLE = "Write a title of at most five words for this request, and nothing else:\n"
FOLLOW_UP = "Good. Run the tests once more and tell me the last line of what they print."
COMPACT_AFTER = 14
MAX_CALLS = 40


def build_tool(name: str, description: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SHELL = build_tool("bash", "Run a shell command in the work folder and return what it prints.", "command")
DELEGATE = build_tool("delegate", "Have a helper search the code; it reports in one sentence.", "question")
calls_left = MAX_CALLS


def main() -> None:
    instruction = sys.argv[1]
    ask([{"role": "user", "content": TITLE + instruction}], [])
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": instruction},
    ]
    # asked twice with other settings: an agent that lost patience with the first answer
    ask(messages, [SHELL, DELEGATE], temperature=0.2)
    print(work(messages, [SHELL, DELEGATE]))
    messages.append({"role": "user", "content": FOLLOW_UP})
    print(work(messages, [SHELL, DELEGATE]))


def work(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """Let the model call tools until it answers; the answer."""
    while True:
        if len(messages) > COMPACT_AFTER:
            notes = "\n".join(message["content"][:80] for message in messages if message["role"] == "assistant")
            messages[2:] = [{"role": "user", "content": f"(History was summed up.) You said so far:\n{notes}\nGo on."}]
        reply = ask(messages, tools)
        if reply is None:
            return ""
        messages.append(reply)
        if not reply.get("tool_calls"):
            return str(reply.get("content") or "")
        for tool_call in reply["tool_calls"]:
            result = run_tool(tool_call["function"])
            messages.append({"role": "tool", "tool_call_id": tool_call["id"], "content": result})


def run_tool(function: dict[str, str]) -> str:
    try:
        arguments = json.loads(function["arguments"])
    except json.JSONDecodeError as error:
        return f"arguments are not JSON: {error}"
    if function["name"] == "delegate":
        system = {"role": "system", "content": SEARCHER}
        return work([system, {"role": "user", "content": arguments["question"]}], [SHELL])
    done = subprocess.run(["bash", "-c", arguments["command"]], capture_output=True, text=True, errors="replace")
    return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"


def ask(messages: list[dict[str, Any]], tools: list[dict[str, Any]], **settings: Any) -> dict[str, Any] | None:
    """The model's message; None where it gives none, or enough was asked."""
    global calls_left
    calls_left -= 1
    if calls_left < 0:
        return None
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    assert url.hostname is not None
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=120)
    body = {"model": "policy", "messages": messages, "max_tokens": 2000, **settings}
    if tools:
        body["tools"] = tools
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
    reply = connection.getresponse()
    content = json.loads(reply.read())
    connection.close()
    if reply.status != 200:
        print(content, file=sys.stderr)
        return None
    message: dict[str, Any] = content["choices"][0]["message"]
    kept = {"role": "assistant", "content": message.get("content") or ""}
    if message.get("tool_calls"):
        kept["tool_calls"] = message["tool_calls"]
    return kept


if __name__ == "__main__":
    main()
