"""Test what `polar-trl doctor` says of an own agent: a small one, in the default sandbox, with faults of its own."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from polar_trl.harness.shell import ShellHarness
from polar_trl.sandbox import build_backend
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.tools import own_agent
from polar_trl.tools.own_agent import Trial, try_agent

AGENT = r"""
import http.client, json, os, subprocess, sys
options = json.loads(sys.argv[1])

def post(path, body):
    connection = http.client.HTTPConnection(os.environ["OPENAI_BASE_URL"].split("/")[2])
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    reply = connection.getresponse()
    text = reply.read()
    if reply.status != 200:
        sys.exit(f"status {reply.status}: {text.decode()[:200]}")
    return json.loads(text)

def chat():
    tools = [{"type": "function", "function": tool} for tool in options["tools"]]
    messages = [{"role": "user", "content": sys.argv[2]}]
    if options.get("refused"):
        try:
            post("/v1/chat/completions", {"messages": [{"role": "king"}]})
        except SystemExit:
            pass
    if options.get("title"):
        post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Give this talk a title."}]})
    for turn in range(options.get("turns", 9)):
        body = {"messages": messages, "tools": tools, "max_tokens": 999, "colour": "red", **options.get("body", {})}
        message = post("/v1/chat/completions", body)["choices"][0]["message"]
        messages.append(message)
        calls = message.get("tool_calls") or []
        if not calls and not options.get("endless"):
            return
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == options.get("end"):
                return print(json.dumps(arguments))
            output = run(arguments)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
        if not calls:
            messages.append({"role": "user", "content": "Go on."})
        if options.get("rewrites"):
            messages[0]["content"] += " Again."

def messages():
    tools = [{"name": t["name"], "input_schema": t["parameters"]} for t in options["tools"]]
    talk = [{"role": "user", "content": sys.argv[2]}]
    while True:
        reply = post("/v1/messages", {"model": "m", "max_tokens": 500, "messages": talk, "tools": tools})
        talk.append({"role": "assistant", "content": reply["content"]})
        uses = [part for part in reply["content"] if part["type"] == "tool_use"]
        if not uses:
            return
        talk.append({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": use["id"], "content": run(use["input"])} for use in uses]})

def run(arguments):
    if options.get("runs") is False:
        return ""
    command = next(iter(arguments.values()))
    words = [command] if isinstance(command, str) else command
    words = words if words[0] == "bash" else ["bash", "-c", *words]
    return subprocess.run(words, capture_output=True, text=True).stdout

{"chat": chat, "messages": messages}[options.get("dialect", "chat")]()
sys.exit(options.get("exit", 0))
"""


def tool(name: str, **properties: object) -> dict[str, object]:
    return {"name": name, "parameters": {"type": "object", "properties": properties, "required": list(properties)}}


TEXT = {"type": "string"}
BASH = tool("Bash", command=TEXT, timeout={"type": "integer"})
READ = tool("read_file", path=TEXT)


def run_doctor(*tools: object, auxiliary_without_tools: bool = False, **options: object) -> Trial:
    words = json.dumps({"tools": tools, **options}).replace("'", "")
    harness = ShellHarness(
        f"python3 -I -S ~/agent.py '{words}' {{instruction}}",
        files={"agent.py": AGENT},
        auxiliary_without_tools=auxiliary_without_tools,
    )
    backend = build_backend("auto")
    try:
        return try_agent(harness, backend=backend)
    finally:
        backend.close()


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_it_runs_the_tool_that_looks_like_a_shell(dialect: str) -> None:
    trial = run_doctor(READ, BASH, dialect=dialect)
    assert (trial.works, trial.why, trial.notes, trial.forks) == (True, "", [], 0)
    name, max_tokens = {"chat": ("openai_chat", 999), "messages": ("anthropic", 500)}[dialect]
    assert (trial.dialects, trial.max_tokens, trial.tools) == ({name: 2}, [max_tokens], ["Bash", "read_file"])
    assert trial.unread == ({"colour": 2} if dialect == "chat" else {})
    first, last = trial.prompt_bytes
    assert 0 < first < last and trial.prompt_tokens is None
    json.dumps(asdict(trial))


@pytest.mark.parametrize(
    "shell",
    [
        tool("execute_command", command=TEXT),
        tool("exec_command", cmd=TEXT, justification=TEXT),
        tool("run_commands", commands={"type": "array", "items": TEXT}),
        tool("shell", command={"type": "array", "items": TEXT}),
        tool("terminal", input=TEXT, is_background={"type": "boolean"}),
    ],
)
def test_shells_have_many_names(shell: dict[str, Any]) -> None:
    editor = tool("str_replace_based_edit_tool", command={"type": "string", "enum": ["view", "create"]}, path=TEXT)
    trial = run_doctor(editor, shell)
    assert (trial.works, trial.notes) == (True, [])


def test_a_tool_that_ends_the_task_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = tool("attempt_completion", result=TEXT, kind={"type": "string", "enum": ["good", "bad"]})
    assert run_doctor(BASH, ending, end="attempt_completion", endless=True).works
    monkeypatch.setattr(own_agent, "MAX_CALLS", 4)
    trial = run_doctor(BASH, endless=True)
    assert not trial.works and trial.why.startswith("it asked the model more than 4 times, and did not end")


@pytest.mark.parametrize(
    ("tools", "options", "why"),
    [
        ([BASH], {"exit": 3}, "it did not end as it should (exit code 3; it printed: ''), after 2 calls"),
        ([BASH], {"runs": False}, "its tool Bash was called, and the file that the command writes is not in the work"),
        ([BASH], {"turns": 0}, "the agent got no answer from the model (exit code 0; it printed nothing)"),
        ([BASH], {"body": {"messages": "x"}}, "refused, and it asked for nothing more: messages: must be an array"),
        ([], {"auxiliary_without_tools": True}, "each of its 1 calls is auxiliary, so that nothing would be trained"),
    ],
)
def test_what_is_wrong_is_one_sentence(tools: Sequence[object], options: dict[str, Any], why: str) -> None:
    trial = run_doctor(*tools, **options)
    assert not trial.works and why in trial.why and "\n" not in trial.why


def test_a_refusal_that_it_got_over_is_counted() -> None:
    trial = run_doctor(BASH, refused=True)
    assert trial.works and [count for name, count in trial.counters.items() if name.startswith("refused_")] == [1]


def test_the_first_prompt_has_to_fit_the_window() -> None:
    harness = ShellHarness("python3 -I -S ~/agent.py '{\"tools\": []}' {instruction}", files={"agent.py": AGENT})
    for window, why in ((65, ""), (64, "its first prompt has 64 tokens, and the context window is 64")):
        backend = build_backend("auto")
        trial = try_agent(harness, backend=backend, model=ByteRenderer(), window=window)
        backend.close()
        assert (trial.why, trial.prompt_tokens) == (why, trial.prompt_bytes)


def test_titles_are_pointed_out_and_left_out() -> None:
    trial = run_doctor(BASH, title=True)
    assert (trial.works, trial.without_tools, trial.auxiliary, trial.forks) == (True, 1, 0, 1)
    assert "1 of its calls declare no tools" in trial.notes[0] and "forks" in trial.notes[1]
    trial = run_doctor(BASH, title=True, auxiliary_without_tools=True)
    assert (trial.works, trial.auxiliary, trial.forks, trial.notes) == (True, 1, 0, [])


def test_an_agent_that_rewrites_its_history_is_told_so() -> None:
    trial = run_doctor(BASH, rewrites=True)
    assert trial.works and trial.notes == ["its calls do not all continue each other: 1 forks, each a row of its own"]


def test_an_agent_without_tools() -> None:
    trial = run_doctor()
    assert trial.works and trial.tools == []
    assert trial.notes == ["it declares no tool that looks like a shell, and did not run a command in a code block"]
