"""A chat server that gives no token ids: sessions, records, the data set, and laws that refuse to train on it."""

import asyncio
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launch import find_warm_python
from openai_servers import ASKED, serve_app
from serving import CHAT, PARAMS, RENDERER, client, http, new_log, serve, wait_until
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from polar_trl.cli import main
from polar_trl.engine.base import GenerationParams
from polar_trl.engine.chat_server import ChatServer
from polar_trl.engine.openai_server import OpenAIServer
from polar_trl.errors import ConfigError, LawError
from polar_trl.eval.sample_tasks import read_results
from polar_trl.grade.command import CommandGrader
from polar_trl.harness.shell import ShellHarness
from polar_trl.reconstruct import build_prefix_merged, check_laws
from polar_trl.recording.log import SessionLog, read_record
from polar_trl.recording.session import SessionLimits
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutRunner
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.types import ChatRequest, Message, Rollout, Task, Tool, ToolCall

ROOT = Path(__file__).resolve().parents[2]
TOOL = {"type": "function", "function": {"name": "shell", "description": "", "parameters": {"type": "object"}}}


def say(text: str | None, finish_reason: str = "stop", **fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, **fields}
    usage = {"prompt_tokens": 21, "completion_tokens": 4, "total_tokens": 25}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}], "usage": usage}


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "shell", "arguments": arguments}
    tool_calls = [{"id": "c1", "type": "function", "function": function}]
    return say(None, "tool_calls", tool_calls=tool_calls, reasoning="I look.")


@contextmanager
def chat(*answers: Any, max_model_len: int = 4096) -> Iterator[ChatServer]:
    """One answer per request: a body, or a whole response."""
    left = list(answers)

    async def completions(request: Request) -> Response:
        ASKED.append(await request.json())
        answer = left.pop(0)
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    ASKED.clear()
    with serve_app({"/v1/chat/completions": completions}) as url:
        server = OpenAIServer(f"{url}/v1")
        yield ChatServer(server, model="strong", max_model_len=max_model_len)
        server.close()


def test_a_session_is_recorded_as_messages(tmp_path: Path) -> None:
    log = SessionLog(session_id="s1", task_id="t", group_id="g", path=tmp_path / "s1.jsonl")
    with chat(call('{"command": "ls"}'), say("One file.")) as model, serve(model, model) as proxy:
        endpoint = proxy.open_session(log)
        agent = client(endpoint)
        messages: list[Any] = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "List the files."},
        ]
        first = agent.chat.completions.create(model="m", messages=messages, tools=[TOOL], stop=["END"])
        messages += [
            first.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": "c1", "content": "notes.txt"},
        ]
        second = agent.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        assert second.choices[0].message.content == "One file."
        # about the tokens of the request, by its size: agents compact their history by it
        assert first.usage is not None
        assert second.usage is not None
        assert 50 < first.usage.prompt_tokens < second.usage.prompt_tokens < 200
        # the same question again is answered from the record
        assert agent.chat.completions.create(model="m", messages=messages, tools=[TOOL]).id == second.id
    assert len(ASKED) == 2
    calls = log.calls
    assert [(c.text_only, c.prompt_ids, c.completion.token_ids, c.parent) for c in calls] == [
        (True, (), (), None),
        (True, (), (), 0),
    ]
    assert calls[0].message.tool_calls == (ToolCall(id="c1", name="shell", arguments='{"command": "ls"}'),)
    assert calls[0].message.reasoning == "I look."
    rollout = Rollout(id="s1", task_id="t", group_id="g", calls=calls, reward=1.0)
    log.close(rollout)
    assert read_record(tmp_path / "s1.jsonl").rollout == rollout
    # what the server was asked: OpenAI's own fields only, the history with the reasoning that it gave
    assert ASKED[1] == {
        "model": "strong",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "List the files."},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "I look.",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "shell", "arguments": '{"command": "ls"}'},
                    }
                ],
            },
            {"role": "tool", "content": "notes.txt", "tool_call_id": "c1"},
        ],
        "max_tokens": PARAMS.max_tokens,
        "temperature": PARAMS.temperature,
        "tools": [TOOL],
    }
    assert ASKED[0]["stop"] == ["END"]


def with_ids(answer: dict[str, Any], prompt: list[int], sampled: list[int]) -> dict[str, Any]:
    ids = {"prompt_token_ids": prompt, "generation_token_ids": sampled, "generation_log_probs": [-0.5] * len(sampled)}
    answer["choices"][0]["message"] |= ids
    return answer


@pytest.mark.parametrize(("second", "num_trajectories"), [([1, 2, 3, 4, 5], 1), ([1, 2, 9, 5], 2)])
def test_ids_in_the_messages_of_gyms_model_server_are_kept(second: list[int], num_trajectories: int) -> None:
    """The second prompt goes on from the first answer, or the server has rendered that in another way."""
    log = new_log()
    answers = with_ids(say("One."), [1, 2], [3, 4]), with_ids(say("Two."), second, [6])
    with chat(*answers) as model, serve(model, model) as proxy:
        agent = client(proxy.open_session(log))
        messages: list[Any] = [{"role": "user", "content": "Count."}]
        agent.chat.completions.create(model="m", messages=messages)
        messages += [{"role": "assistant", "content": "One."}, {"role": "user", "content": "Go on."}]
        agent.chat.completions.create(model="m", messages=messages)
    assert [tuple(call.prompt_ids) for call in log.calls] == [(1, 2), tuple(second)]
    assert not any(call.text_only for call in log.calls)
    rollout = Rollout(id="s1", task_id="t", group_id="g", calls=log.calls)
    reconstruction = build_prefix_merged(rollout)
    check_laws(rollout, reconstruction)
    assert len(reconstruction.trajectories) == num_trajectories


def test_ids_that_cannot_be_right_are_a_fault_of_the_server() -> None:
    broken = with_ids(say("One."), [1, 2], [3, 4])
    broken["choices"][0]["message"]["generation_log_probs"] = [-0.5]
    log = new_log()
    with chat(broken) as model, serve(model, model) as proxy:
        body = {"messages": [{"role": "user", "content": "Count."}]}
        assert http(proxy.open_session(log)).post(CHAT, json=body).status_code == 503
    assert log.counters["engine_errors"] == 1


def test_the_laws_refuse_to_train_on_it() -> None:
    log = new_log()
    with chat(say("hello")) as model, serve(model, model) as proxy:
        client(proxy.open_session(log)).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
    rollout = Rollout(id="s1", task_id="t", group_id="g", calls=log.calls, reward=1.0)
    reconstruction = build_prefix_merged(rollout)
    assert reconstruction.trajectories == ()
    with pytest.raises(LawError, match=r"rollout s1: calls \[0\] came as text without token ids"):
        check_laws(rollout, reconstruction)


def test_no_renderer_can_be_put_beside_it() -> None:
    with chat() as model, pytest.raises(ValueError, match="the engine is its own renderer"):
        serve(model, RENDERER).__enter__()


def test_budget_and_counts() -> None:
    log = new_log()
    with chat(say("one"), say("two")) as model, serve(model, model) as proxy:
        endpoint = proxy.open_session(log, SessionLimits(max_sampled_tokens=8))  # the server counts 4 for each answer
        agent = client(endpoint)
        texts = [
            agent.chat.completions.create(model="m", messages=[{"role": "user", "content": text}]).choices[0].message
            for text in ("a", "b", "c")
        ]
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}]}
        counted = http(endpoint).post(
            "/v1/messages/count_tokens", json=body, headers={"anthropic-version": "2023-06-01"}
        )
    assert [text.content for text in texts[:2]] == ["one", "two"]
    assert "budget" in (texts[2].content or "")
    assert log.calls[2].is_answered is False
    assert 100 <= counted.json()["input_tokens"] <= 130


@pytest.mark.parametrize(
    ("answer", "status", "counter"),
    [
        (
            JSONResponse({"error": {"message": "This model's maximum context length is 10 tokens"}}, 400),
            400,
            "context_overflows",
        ),
        (JSONResponse({"error": {"message": "no such parameter"}}, 422), 400, "refused_server"),
        (JSONResponse({"error": {"message": "bad key"}}, 401), 503, "engine_errors"),
        (JSONResponse({"error": {"message": "it broke"}}, 500), 503, "engine_errors"),
        ({"choices": []}, 503, "engine_errors"),
        (say(None, content=7), 503, "engine_errors"),
    ],
)
def test_what_a_server_cannot_do(answer: Any, status: int, counter: str) -> None:
    log = new_log()
    with chat(answer, answer) as model, serve(model, model) as proxy:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        reply = http(proxy.open_session(log)).post(CHAT, json=body)
    assert reply.status_code == status
    assert log.calls == ()
    assert log.counters == {counter: 1}
    if "context" in str(reply.json()):
        assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_an_answer_gets_what_is_left_of_the_context() -> None:
    refusal = JSONResponse({"error": {"message": "max_tokens is too large for the context length of 4096"}}, 400)
    log = new_log()
    with chat(refusal, say("short")) as model, serve(model, model) as proxy:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        reply = http(proxy.open_session(log)).post(CHAT, json=body)
    assert reply.json()["choices"][0]["message"]["content"] == "short"
    first, second = ASKED
    assert first.pop("max_tokens") > 0 and first == second


@pytest.mark.parametrize(("sent", "kept"), [({"path": "ü"}, '{"path": "ü"}'), ([1], "[1]"), (None, "{}")])
def test_arguments_that_are_no_text(sent: Any, kept: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "read", "arguments": sent}}
    with chat(say(None, "tool_calls", tool_calls=[call])) as model:
        request = ChatRequest(messages=(Message(role="user", text="x"),))
        reply = asyncio.run(model.answer(request, (), GenerationParams(max_tokens=8)))
    (made,) = reply.message.tool_calls
    assert (made.arguments, made.parse_status) == (kept, "malformed" if sent == [1] else "ok")


def test_the_probe_asks_with_a_tool() -> None:
    refusal = JSONResponse({"error": {"message": '"auto" tool choice requires --enable-auto-tool-choice'}}, 400)
    with chat(refusal) as model, pytest.raises(ConfigError, match="--enable-auto-tool-choice and --tool-call-parser"):
        model.probe(PARAMS)
    assert ASKED[0]["tools"][0]["function"]["name"] == "read_file"
    with chat(say("hello")) as model:
        model.probe(PARAMS)


def test_malformed_arguments_are_marked() -> None:
    log = new_log()
    with chat(call('{"command": ls')) as model, serve(model, model) as proxy:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
        assert http(proxy.open_session(log)).post(CHAT, json=body).status_code == 200
    [tool_call] = log.calls[0].message.tool_calls
    assert (tool_call.arguments, tool_call.parse_status) == ('{"command": ls', "malformed")
    assert log.calls[0].request.tools == (Tool(name="shell", parameters={"type": "object"}),)


def test_a_session_is_graded_and_has_no_trajectory(tmp_path: Path) -> None:
    task = Task(id="t", instruction="Write.", grader="grep -q hello answer.txt")
    harness = ShellHarness(
        """python3 -I -S -c 'import os, json, urllib.request as u
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Word?"}]}).encode()
key = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
reply = json.load(u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)))
open("answer.txt", "w").write(reply["choices"][0]["message"]["content"])'"""
    )
    with chat(say("hello")) as model, serve(model, model) as proxy:
        runner = RolloutRunner(
            proxy=proxy,
            backend=LocalSandboxBackend(),
            harness=harness,
            grader=CommandGrader(task.grader or ""),
            config=RolloutConfig(),
        )
        [finished] = runner.run([Job(rollout_id="r", group_id="g", task=task, record_path=tmp_path / "r.jsonl")])
    assert (finished.rollout.reward, finished.rollout.stop_reason, finished.rollout.error) == (1.0, "completed", None)
    assert finished.reconstruction.trajectories == ()
    assert read_record(tmp_path / "r.jsonl").rollout.calls[0].message.text == "hello"


def test_the_command_collects_messages_and_says_so(tmp_path: Path) -> None:
    """It is asked for token ids first, which it does not have: that is said, and the data set is messages."""

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "strong"}]})

    async def completions(request: Request) -> Response:
        body = await request.json()
        ASKED.append(body)
        task = re.search(r"^Run this shell command: (.*)", body["messages"][-1]["content"])
        return JSONResponse(say(f"```bash\n{task[1] if task else 'false'}\n```"))

    ASKED.clear()
    command = [find_warm_python(), "-m", "polar_trl", "collect", "--config", "quickstart"]
    command += ["--limit", "3", "--output_dir", str(tmp_path / "out")]

    def collect(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], capture_output=True, text=True, timeout=600, cwd=ROOT)

    with serve_app({"/v1/models": models, "/v1/chat/completions": completions}) as url:
        done = collect("--base_url", f"{url}/v1")
        assert done.returncode == 0, done.stderr[-3000:]
        assert "polar-trl: text only, without token ids: " in done.stderr
        assert "text only: 2 rows have no token ids" in done.stdout
        assert "accepted sessions: " not in done.stderr  # a line of progress that would stay above the table
        num_asked = len(ASKED)
        again = collect("--base_url", f"{url}/v1", "--json")
        assert len(ASKED) == num_asked  # nothing is left to run
        other = collect("--base_url", f"{url}/v1", "--served_name", "weak")
        assert "served_name is 'weak' and was 'strong'" in other.stderr or "'weak' is not among them" in other.stderr
    results = read_results(tmp_path / "out")
    assert [result.sampled_tokens for result in results] == [4 * result.calls for result in results]
    assert json.loads((tmp_path / "out" / "settings.json").read_text())["served_name"] == "strong"
    report = json.loads(again.stdout)
    assert report["total"] == {"tasks": 3, "attempts": 3, "accepted": 2, "failed": 0, "rate": 0.6667}
    assert (report["rows"]["tokens"], report["text_only_rows"]) == ({}, 2)
    card = (tmp_path / "out" / "dataset" / "README.md").read_text()
    assert "**Text only:** 2 rows come from a server that gives no token ids." in card
    assert "# Sessions of shell with strong\n" in card and "Both forms" not in card
    assert main(["replay", str(tmp_path / "out")]) == 0
    from datasets import load_dataset

    data_set = load_dataset(report["data_set"], cache_dir=str(tmp_path / "cache"))
    assert list(data_set) == ["train"]
    row = data_set["train"][0]
    assert row["task_id"] == "copy_command-0-0000"
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert row["messages"][-1] == {"role": "assistant", "content": "```bash\necho south > snow.txt\n```"}
    assert "input_ids" not in row


def test_an_interrupted_collection_goes_on(tmp_path: Path) -> None:
    """Ctrl-C after the first of three sessions: what has ended is kept, and there is no data set until all have."""
    released = False

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "strong"}]})

    async def completions(request: Request) -> Response:
        body = await request.json()
        ASKED.append(body)
        while (
            len(ASKED) > 2 and not released and not await request.is_disconnected()
        ):  # the probe's, and one session's
            await asyncio.sleep(0.02)
        return JSONResponse(say("```bash\ntrue\n```"))

    ASKED.clear()
    out = tmp_path / "out"
    command = [find_warm_python(), "-m", "polar_trl", "collect", "--config", "quickstart", "--text_only"]
    command += ["--limit", "3", "--output_dir", str(out), "--min_reward", "0", "--max_agents", "1", "--json"]
    with serve_app({"/v1/models": models, "/v1/chat/completions": completions}) as url:
        command += ["--base_url", f"{url}/v1"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        wait_until(lambda: (len(ASKED) == 3 and bool(read_results(out))) or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=600)
        assert process.returncode == 130, said[-3000:]
        assert said.strip().splitlines()[-1] == "polar-trl: stopped; the same command goes on with what is left"
        assert [result.reward is not None for result in read_results(out)] == [True]
        assert not (out / "dataset").exists()
        released = True
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1 graded sessions and 0 without a reward are there already, 2 sessions are left to run" in done.stderr
    report = json.loads(done.stdout)
    assert (report["total"]["attempts"], report["rows"]["messages"]["(none)"]["train"]) == (3, 3)


def test_halves_of_characters_that_a_server_sends_are_replaced() -> None:
    broken = json.dumps(call('{"command": "a\\ud83d"}') | {"id": "\ud83d"})
    broken = broken.replace('"shell"', '"shell\\ud83d"').replace('"c1"', '"c1\\udc00"').replace("I look.", "I\\ud83d")
    refused = Response('{"error": {"message": "no \\ud83d"}}', status_code=400, media_type="application/json")
    with chat(Response(broken, media_type="application/json"), refused) as model, serve(model, model) as proxy:
        endpoint = proxy.open_session(log := new_log())
        with http(endpoint) as agent:
            body = {"messages": [{"role": "user", "content": "q"}], "tools": [TOOL]}
            message = agent.post(CHAT, json=body).json()["choices"][0]["message"]
            assert message["reasoning_content"] == "I\ufffd"
            assert message["tool_calls"][0]["function"]["name"] == "shell\ufffd"
            assert (log.calls[0].message.tool_calls[0].id, message["tool_calls"][0]["id"]) == ("c1\ufffd", "c1\ufffd")
            answer = agent.post(CHAT, json=body | {"messages": [{"role": "user", "content": "r"}]})
            assert answer.status_code == 400 and "no \ufffd" in answer.json()["error"]["message"]
