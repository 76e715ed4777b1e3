"""What the world does to a session is no reward, never 0: a stopped trainer, a busy server, an odd engine."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai_servers import serve_app
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import polar_trl.engine.openai_server as openai_server
from polar_trl.engine.base import Engine, GenerationParams
from polar_trl.engine.chat_server import ChatServer
from polar_trl.engine.openai_server import OpenAIServer
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import ConfigError, EngineBusyError
from polar_trl.eval.sample_tasks import list_samples, open_folder, read_results, sample_tasks
from polar_trl.eval.summary import build_summary
from polar_trl.grade.function import FunctionGrader
from polar_trl.harness.shell import ShellHarness
from polar_trl.proxy import Proxy
from polar_trl.rollout import heartbeat
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutRunner
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Completion, Message, Rollout, Task, TokenIds

RENDERER = ByteRenderer()
REPLY = RENDERER.spell(Message(role="assistant", text="done"))
ASK = """
import json, os, sys, time, urllib.error, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
tries = int(sys.argv[2]) if len(sys.argv) > 2 else 1
while True:
    try:
        urllib.request.urlopen(request, timeout=float(sys.argv[3]) if len(sys.argv) > 3 else 120).read()
        break
    except urllib.error.HTTPError:
        tries -= 1
        if not tries:
            raise
        time.sleep(0.1)
"""
"""An agent's question: its text, how often it is asked while it is refused, and for how long it is waited (s)."""
HARNESS = ShellHarness("bash -c {instruction}", files={"ask.py": ASK})


def run_sessions(
    tmp_path: Path,
    engine: Engine,
    *scripts: str,
    grade: Callable[[Task, Any], Any] = lambda task, box: 0.0,
    limit_s: float = 120.0,
    max_grading: int = 4,
) -> list[Rollout]:
    """Run agents that are shell scripts, one after the other."""
    renderer = engine.own_renderer or RENDERER
    with Proxy(engine, renderer, params=GenerationParams(max_tokens=50)) as proxy:
        runner = RolloutRunner(
            proxy=proxy,
            backend=LocalSandboxBackend(tmp_path / "boxes"),
            harness=HARNESS,
            grader=FunctionGrader(grade),
            config=RolloutConfig(max_agents=1, max_grading=max_grading),
        )
        jobs = [
            Job(rollout_id=f"r{i}", group_id="g", task=Task(id=f"t{i}", instruction=text, agent_timeout_s=limit_s))
            for i, text in enumerate(scripts)
        ]
        return [finished.rollout for finished in runner.run(jobs)]


STOPPED = """
import json, sys
from pathlib import Path
from test_world import HARNESS, RENDERER, REPLY
from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.grade.function import FunctionGrader
from polar_trl.proxy import Proxy
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutRunner
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.types import Task

def reply(prompt_ids):
    print("asked", flush=True)
    return REPLY

def grade(task, box):
    if task.id != "graded":
        return 1.0
    print("graded", flush=True)
    return float(not box.run("sleep 60", env={}, timeout_s=10).timed_out)

SCRIPTS = {
    "patient": "python3 ~/ask.py one; sleep 8; python3 ~/ask.py two",
    "impatient": "python3 ~/ask.py one && sleep 3 && python3 ~/ask.py two 1 3",
    "graded": "python3 ~/ask.py one",
}
with Proxy(ScriptedEngine(reply), RENDERER, params=GenerationParams(max_tokens=50)) as proxy:
    runner = RolloutRunner(
        proxy=proxy, backend=LocalSandboxBackend(Path(sys.argv[1])), harness=HARNESS, grader=FunctionGrader(grade),
        config=RolloutConfig(),
    )
    tasks = [Task(id=name, instruction=text, agent_timeout_s=13) for name, text in SCRIPTS.items()]
    jobs = [Job(rollout_id=task.id, group_id="g", task=task) for task in tasks]
    for finished in runner.run(jobs):
        rollout = finished.rollout
        found = [rollout.id, rollout.stop_reason, rollout.reward, rollout.error_kind, rollout.error]
        print("found", json.dumps(found), flush=True)
"""


def test_a_trainer_that_was_stopped_blames_nobody(tmp_path: Path) -> None:
    """For 14 s, with agents that have 13 s: one waits, one loses patience with its model, and one is being graded."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(tmp_path / "boxes")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert child.stdout is not None
    try:
        started = [child.stdout.readline().strip() for _ in range(4)]
        assert sorted(started) == ["asked", "asked", "asked", "graded"]
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(14)
        os.kill(child.pid, signal.SIGCONT)
        said, _ = child.communicate(timeout=120)
    finally:
        child.kill()
    found = [json.loads(line.removeprefix("found ")) for line in said.splitlines() if line.startswith("found ")]
    patient, impatient, graded = found
    assert patient == ["patient", "completed", 1.0, None, None]
    assert impatient[:4] == ["impatient", "agent_failed", None, "model_calls_failed"]
    assert graded[:4] == ["graded", "completed", None, "grader_failed"]
    for what, (_, _, _, _, error) in (("the agent ran and failed", impatient), ("the session was graded", graded)):
        assert error.startswith("this process was stopped for 1") and f" s while {what}" in error


def test_a_stop_is_told_from_a_busy_process(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"monotonic": 100.0, "process_time": 10.0}
    for name in clock:
        monkeypatch.setattr(heartbeat.time, name, lambda name=name: clock[name])
    beat = heartbeat.Heartbeat()

    def look_after(seconds: float, cpu_s: float) -> float:
        clock["monotonic"] += seconds
        clock["process_time"] += cpu_s
        return beat.look()

    assert look_after(0.25, 0.0) == 0.0
    assert look_after(9.0, 9.0) == 0.0  # a thread held the interpreter's lock
    assert look_after(9.0, 0.1) == 9.0
    assert look_after(1.0, 0.0) == 9.0
    assert look_after(5.0, 0.0) == 14.0


def test_waiting_for_a_place_is_no_stop(tmp_path: Path) -> None:
    """Two sessions and one place to be graded in, where each takes longer than the shortest stop that is noticed."""

    def grade(task: Task, box: Any) -> float:
        time.sleep(heartbeat.MIN_STOP_S + 0.5)
        return 1.0

    rollouts = run_sessions(
        tmp_path, ScriptedEngine(lambda ids: REPLY), *["python3 ~/ask.py one"] * 2, grade=grade, max_grading=1
    )
    assert [(rollout.reward, rollout.error) for rollout in rollouts] == [(1.0, None)] * 2


TWICE = "python3 ~/ask.py one && python3 ~/ask.py two"


def busy_after(answers: int, refusals: float = math.inf) -> ScriptedEngine:
    """An engine that answers so often, is too busy so often, and answers again."""
    count = 0

    def reply(prompt_ids: TokenIds) -> Any:
        nonlocal count
        count += 1
        if answers < count <= answers + refusals:
            return EngineBusyError("too many requests", retry_after_s=1.0)
        return REPLY

    return ScriptedEngine(reply)


def test_a_server_that_is_busy_to_the_end_is_no_reward(tmp_path: Path) -> None:
    refused, again, waited = (
        run_sessions(tmp_path, engine, script)[0]
        for engine, script in (
            (busy_after(1), TWICE),
            (busy_after(1, refusals=2), "python3 ~/ask.py one && python3 ~/ask.py two 5"),
            # an agent that carries on without its answer is not judged either
            (busy_after(1), f"{TWICE}; true"),
        )
    )
    for rollout in (refused, waited):
        assert (rollout.reward, rollout.error_kind, rollout.stop_reason) == (None, "engine_busy", "agent_failed")
        assert rollout.error is not None and "too busy for 1 of the agent's calls" in rollout.error
        assert [call.is_answered for call in rollout.calls] == [True]
    assert (again.reward, again.error_kind, again.counters) == (0.0, None, {"calls_sent_back": 2})


def test_an_agent_that_waits_for_a_busy_server_until_its_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def answer(request: Request) -> Response:
        nonlocal asked
        asked += 1
        if asked > 1:
            return JSONResponse({"error": {"message": "too many"}}, 429, {"retry-after": "20"})
        message = {"role": "assistant", "content": "hello"}
        return JSONResponse({"choices": [{"message": message, "finish_reason": "stop"}]})

    with serve_app({"/v1/chat/completions": answer}) as url:
        server = OpenAIServer(f"{url}/v1")
        engine = ChatServer(server, model="m", max_model_len=4096)
        (rollout,) = run_sessions(tmp_path, engine, TWICE, limit_s=8.0)
        server.close()
    assert (rollout.reward, rollout.error_kind, asked) == (None, "engine_busy", 2)


@pytest.mark.parametrize(
    ("said", "low_s", "high_s"),
    [("7", 7, 7), ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0), ("date", 100, 140), ("soon", 0, 0), ("-3", 0, 0)],
)
def test_a_server_says_when_to_come_back(said: str, low_s: float, high_s: float) -> None:
    if said == "date":
        said = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 120))
    response = openai_server.httpx.Response(429, headers={"retry-after": said})
    assert low_s <= openai_server._read_retry_after(response) <= high_s


def test_an_evaluation_runs_again_what_a_busy_server_turned_away(tmp_path: Path) -> None:
    out, tasks = tmp_path / "out", [Task(id="a", instruction=TWICE), Task(id="b", instruction="python3 ~/ask.py x")]

    def evaluate(engine: Engine) -> None:
        with (
            open_folder(out, {"model": "m"}) as before,
            Proxy(engine, RENDERER, params=GenerationParams(max_tokens=50)) as proxy,
        ):
            runner = RolloutRunner(
                proxy=proxy,
                backend=LocalSandboxBackend(tmp_path / "boxes"),
                harness=HARNESS,
                grader=FunctionGrader(lambda task, box: 1.0),
                config=RolloutConfig(max_agents=1),
            )
            samples = list_samples(tasks, before, num_samples=1, max_attempts=2)
            sample_tasks(runner, samples, out, max_attempts=2)
            runner.close()

    def refuse_two(prompt_ids: TokenIds) -> Any:
        is_two = RENDERER.render((Message(role="user", text="two"),), ()) == prompt_ids
        return EngineBusyError("too many requests", retry_after_s=1.0) if is_two else REPLY

    evaluate(ScriptedEngine(refuse_two))
    summary = build_summary(["a", "b"], read_results(out), num_samples=1, ks=[1])
    assert summary["sessions"] == {"wanted": 2, "graded": 1, "passed": 1, "failed": 1, "missing": 0}
    assert summary["failures"]["engine_busy"]["sessions"] == 2  # and no failure of the model's
    assert summary["pass_at"]["1"]["rate"] == 1.0
    evaluate(ScriptedEngine(lambda prompt_ids: REPLY))  # though its two attempts are used up
    summary = build_summary(["a", "b"], read_results(out), num_samples=1, ks=[1])
    assert summary["sessions"] == {"wanted": 2, "graded": 2, "passed": 2, "failed": 0, "missing": 0}


class Odd(ScriptedEngine):
    """Answers once, and then as told."""

    def __init__(self, answer: Callable[[Completion], Any]) -> None:
        super().__init__(lambda prompt_ids: REPLY)
        self._answer = answer
        self._count = 0

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        self._count += 1
        right = await super().generate(prompt_ids, params)
        return right if self._count == 1 or self._count > 2 else self._answer(right)


def fail(completion: Completion) -> Completion:
    raise RuntimeError("CUDA error: an illegal memory access")


def say(value: float) -> Callable[[Completion], Completion]:
    return lambda right: replace(right, logprobs=(value,) * len(right.logprobs))


def sample(token_id: int) -> Callable[[Completion], Completion]:
    return lambda right: replace(right, token_ids=(token_id,) * len(right.token_ids))


ODD = {
    "raises": (fail, "RuntimeError: CUDA error"),
    "NaN": (say(math.nan), "log-probability nan for sampled token 0"),
    "minus infinity": (say(-math.inf), "log-probability -inf for sampled token 0"),
    "positive": (say(3.0), "log-probability 3.0 for sampled token 0"),
    "an id beyond any vocabulary": (sample(10**12), "gave id 1000000000000 for sampled token 0"),
    "an id below 0": (sample(-1), "gave id -1 for sampled token 0"),
    "nothing": (lambda right: replace(right, token_ids=(), logprobs=()), "the engine sampled no token"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_answer_of_the_engine_is_one_sessions_and_no_reward(tmp_path: Path, name: str) -> None:
    answer, message = ODD[name]
    odd, other = run_sessions(tmp_path, Odd(answer), TWICE, TWICE)
    if odd.reward is not None:  # which of them runs first is nobody's affair
        odd, other = other, odd
    assert (odd.reward, odd.error_kind) == (None, "model_calls_failed")
    assert odd.error is not None and message in odd.error
    assert len(odd.calls) <= 1  # nothing of it can be trained
    assert (other.reward, other.error) == (0.0, None)


def test_an_engine_that_hangs_costs_its_session_and_no_other(tmp_path: Path) -> None:
    class Hanging(ScriptedEngine):
        async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
            if RENDERER.render((Message(role="user", text="hang"),), ()) == prompt_ids:
                await asyncio.sleep(3600)
            return await super().generate(prompt_ids, params)

    engine = Hanging(lambda prompt_ids: REPLY)
    rollouts = run_sessions(tmp_path, engine, "python3 ~/ask.py hang", "python3 ~/ask.py one", limit_s=6.0)
    assert [(r.reward, r.error_kind) for r in rollouts] == [(None, "no_calls"), (0.0, None)]


@pytest.mark.parametrize(("port", "reason"), [(None, "Address already in use"), (80_000, "ports are 0 to 65535")])
def test_a_port_that_cannot_be_had(port: int | None, reason: str) -> None:
    with Proxy(ScriptedEngine([]), RENDERER, params=GenerationParams(max_tokens=5)) as proxy:
        wanted = port or int(proxy.origin.rpartition(":")[2])
        with pytest.raises(
            ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{wanted} \({reason}.*choose another port"
        ):
            Proxy(ScriptedEngine([]), RENDERER, params=GenerationParams(max_tokens=5), port=wanted).start()
