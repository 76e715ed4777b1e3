"""The web application: what it answers, and whom; the command that serves it."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from recorded import build_call, describe_rollout, write_rows, write_session
from starlette.testclient import TestClient

from polar_trl.cli import main
from polar_trl.run_folder import read_log
from polar_trl.tools.inspector import sessions
from polar_trl.tools.inspector.app import build_app
from polar_trl.tools.inspector.curves import Curves
from polar_trl.tools.inspector.run_folder import RunFolder
from polar_trl.types import Message

NAME = "train-00000-g000-r000"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    message = Message(role="user", text="lone \ud800 surrogate </script><img src=x onerror=alert(1)>")
    write_session(folder, NAME, [build_call(NAME, 0, (1, 2), (3,), messages=(message,), logprobs=(-math.inf,))])
    write_session(folder, "train-00000-g000-r001", [], reward=None, stop_reason="no_calls", error="nothing\nsaid")
    write_rows(folder, 1, [describe_rollout(NAME, -0.5)])
    lines = [{"step": 1, "reward": 0.5, "reward_std": math.nan, "grad_norm": 1.0}, {"step": 1, "eval_reward": 0.25}]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2, "torn')
    return folder


@pytest.fixture
def client(run: Path) -> Iterator[TestClient]:
    with TestClient(build_app(RunFolder(run)), base_url="http://127.0.0.1:8123") as client:
        yield client


def list_files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_the_run_and_its_curves(client: TestClient) -> None:
    told = client.get("/api/run").json()
    assert (told["name"], told["step"], told["num_sessions"]) == ("run", 1, 2)
    assert told["choices"]["ended"] == {"completed": 1, "failed": 1}
    assert not told["vocabulary"]["known"]
    charts = {chart["title"]: chart for chart in client.get("/api/curves").json()["charts"]}
    assert charts["Reward"]["series"] == [{"name": "mean", "values": [0.5]}]
    assert charts["Reward"]["evaluated"] == [[1, 0.25]]
    assert "Reward spread" not in charts, "NaN is no value"
    assert charts["Gradient norm"]["series"][0]["values"] == [1.0]


def test_curves_follow_the_log(run: Path) -> None:
    with (run / "log.jsonl").open("a") as file:
        file.write(
            "\n" + json.dumps({"step": 1, "reward": 0.75}) + "\n" + json.dumps({"step": 3, "reward": 1.0}) + "\n"
        )
    assert [line["reward"] for line in read_log(run) if "reward" in line] == [0.75, 1.0]
    curves = Curves(run)
    assert curves.build()["charts"][0]["steps"] == [1, 3]
    version = curves.version
    curves.build()
    assert curves.version == version, "a log that has not changed is not read again"


def test_the_usual_parts_of_a_stack_come_first(tmp_path: Path) -> None:
    stopped = {f"polar/stopped/{name}": 1 for name in ("agent_timeout", "agent_failed", "completed", "zebra", "ant")}
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5, **stopped}) + "\n")
    (chart,) = [chart for chart in Curves(tmp_path).build()["charts"] if chart["title"] == "How sessions ended"]
    names = [series["name"] for series in chart["series"]]
    assert names == ["completed", "agent failed", "agent timeout", "ant", "zebra"]


def test_a_session_with_anything_in_it_is_json(client: TestClient) -> None:
    rows = client.get("/api/sessions", params={"sort": "rollout"}).json()["rows"]
    assert [(row["reward"], row["advantage"]) for row in rows] == [(1.0, -0.5), (None, None)]
    told = client.get("/api/session", params={"key": rows[0]["key"]}).json()
    assert told["row"]["rollout"] == NAME and [item["rollout"][-4:] for item in told["group"]] == ["r000", "r001"]
    (call,) = client.get("/api/calls", params={"key": rows[0]["key"], "first": 0}).json()
    assert call["messages"][0]["text"]["text"] == "lone ⟨U+D800⟩ surrogate </script><img src=x onerror=alert(1)>"
    lines = client.get("/api/lines", params={"key": rows[0]["key"], "track": 0}).json()
    assert (lines["ids"], lines["texts"], lines["engine"]) == ([1, 2, 3], ["1 ", "2 ", "3 "], [None, None, None])
    empty = client.get("/api/session", params={"key": rows[1]["key"]}).json()
    assert (empty["calls"], empty["tracks"], empty["row"]["error"]) == ([], [], "nothing\nsaid")


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("session?key=../../etc/passwd", 404),
        ("session?key=%2e%2e/%2e%2e/secret", 404),
        ("session", 404),
        ("lines?key={key}&track=9", 404),
        ("lines?key={key}&track=-1", 400),
        ("lines?key={key}&track=0&count=1e9", 400),
        ("text?key={key}&call=0&part=../../secret", 404),
        ("text?key={key}&call=99&part=reply.text", 404),
        ("fork?key={key}&track=0", 404),
        ("sessions?sort=beauty", 400),
        ("sessions?reward=much", 400),
        ("sessions?step=3-", 400),
        ("sessions?run=1", 404),
        ("ending?key=1~{key}", 404),
        ("nothing", 404),
    ],
)
def test_wrong_questions_get_an_answer_that_says_so(client: TestClient, query: str, status: int) -> None:
    key = client.get("/api/sessions?sort=rollout").json()["rows"][0]["key"]
    reply = client.get(f"/api/{query.format(key=key)}")
    assert reply.status_code == status


def test_only_pages_of_this_machine_are_answered(client: TestClient, run: Path) -> None:
    before = list_files(run)
    for host in ("evil.example", "evil.example:8123", "127.0.0.1.evil.example", "10.0.0.1"):
        assert client.get("/api/run", headers={"host": host}).status_code == 400
    for host in ("127.0.0.1:1", "localhost:8123", "localhost"):
        assert client.get("/api/run", headers={"host": host}).status_code == 200
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.request(method, "/api/run").status_code == 405
        assert client.request(method, "/").status_code == 405
    page = client.get("/")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert (
        "access-control-allow-origin" not in client.get("/api/run", headers={"origin": "http://evil.example"}).headers
    )
    for path in ("/../app.py", "/%2e%2e/app.py", "/..%2f..%2fapp.py", "//etc/passwd", "/static/../../app.py"):
        assert client.get(path).status_code == 404
    assert list_files(run) == before, "looking at a run changes nothing"


def test_pages_need_nothing_from_elsewhere() -> None:
    static = Path(__file__).parents[3] / "polar_trl" / "tools" / "inspector" / "static"
    vendored = static / "vendor" / "uPlot.iife.min.js"
    paths = [*(path for path in static.iterdir() if path.is_file()), vendored, static / "vendor" / "uPlot.min.css"]
    for path in paths:
        text = path.read_text().removeprefix("/*! https://github.com/leeoniya/uPlot (v1.6.32) */")
        assert set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)) <= {"http://www.w3.org"}, path
        assert "innerHTML" not in text and "eval(" not in text, path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{tmp}/nowhere"], "no such folder"),
        (["{tmp}/empty"], "not a run's folder"),
        (["{run}", "--tokenizer", "{tmp}/empty"], "no tokenizer.json"),
        (["{run}", "{tmp}/empty"], "{tmp}/empty: not a run's folder"),
        (["{run}", "--port", "70000"], "--port is 70000"),
        (["{run}", "--port", "{taken}"], "cannot listen on port {taken} (Address already in use); choose another"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names: dict[str, Any] = {"tmp": tmp_path, "run": run, "taken": taken.getsockname()[1]}
        assert main(["inspect", *(argument.format(**names) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words.format(**names) in err and err.count("\n") == 1


def test_the_command_serves_until_it_is_interrupted(run: Path) -> None:
    before = list_files(run)
    command = [sys.executable, "-m", "polar_trl", "inspect", str(run)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as served:
        try:
            assert served.stdout is not None and served.stderr is not None
            said = served.stdout.readline()
            address = said.split(" at ")[1].split()[0]
            assert address.startswith("http://127.0.0.1:")
            assert httpx.get(f"{address}api/run").json()["num_sessions"] == 2
            port = int(address.rstrip("/").rpartition(":")[2])
            bound = [
                line.split()[1]
                for line in Path("/proc/net/tcp").read_text().splitlines()
                if f":{port:04X} 00000000" in line
            ]
            assert bound == [f"0100007F:{port:04X}"], "loopback and nothing else"
            served.send_signal(signal.SIGINT)
            assert served.wait(timeout=600) == 0
            assert "Traceback" not in served.stderr.read()
        finally:
            served.kill()
    assert list_files(run) == before


def test_a_page_loads_nothing_of_training() -> None:
    code = "import json, sys, polar_trl.cli.inspect, polar_trl.tools.inspector.app; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert not {"torch", "trl", "vllm", "transformers", "accelerate", "peft", "datasets"} & set(
        json.loads(done.stdout)
    )


def test_a_folder_of_an_evaluation_opens_without_curves(tmp_path: Path) -> None:
    path = write_session(tmp_path, NAME, [build_call(NAME, 0, (1,), (2,))])
    line = {"task": "task", "sample": 0, "attempt": 0, "rollout": NAME, "record": str(path.relative_to(tmp_path))}
    (tmp_path / "results.jsonl").write_text(json.dumps(line) + "\n")
    with TestClient(build_app(RunFolder(tmp_path)), base_url="http://localhost") as client:
        told = client.get("/api/run").json()
        assert (told["has_curves"], told["num_sessions"], told["step"]) == (False, 1, None)
        assert client.get("/api/curves").json()["charts"] == []
        key = client.get("/api/sessions").json()["rows"][0]["key"]
        assert client.get("/api/session", params={"key": key}).json()["tokens"] == {"trainable": 1}


def test_a_session_of_text_without_ids_has_a_conversation(tmp_path: Path) -> None:
    write_session(tmp_path, NAME, [build_call(NAME, 0, (), (), text_only=True)])
    with TestClient(build_app(RunFolder(tmp_path)), base_url="http://localhost") as client:
        key = client.get("/api/sessions").json()["rows"][0]["key"]
        told = client.get("/api/session", params={"key": key}).json()
        assert (told["calls"][0]["text_only"], told["tracks"]) == (True, [])
        assert client.get("/api/calls", params={"key": key, "first": 0}).json()[0]["reply"]["text"]["text"] == "ok"


def test_odd_lines_leave_the_pages_whole(client: TestClient, run: Path) -> None:
    with (run / "log.jsonl").open("a") as file:
        file.write(
            '\n{"step": Infinity, "reward": 1}\n{"step": NaN}\n[]\n{"step": 4, "reward": NaN, "entropy": 0.5}\n'
        )
        file.write('{"step": 5, "eval_reward": 0.5}\n{"step": 5, "train_runtime": 3.0}\n')
    told = client.get("/api/run")
    assert (told.status_code, told.json()["step"]) == (200, 5)
    charts = {chart["title"]: chart for chart in client.get("/api/curves").json()["charts"]}
    assert charts["Reward"]["series"][0]["values"] == [0.5, None] and charts["Reward"]["steps"] == [1, 4]
    assert charts["Reward"]["evaluated"] == [[1, 0.25], [5, 0.5]], "the summary of the end replaces no evaluation"


def test_what_is_no_number_for_a_browser_is_null(run: Path) -> None:
    (run / "settings.json").write_text('{"temperature": NaN, "max_steps": 3}')
    write_rows(run, 2, [describe_rollout(NAME, math.nan)])
    with TestClient(build_app(RunFolder(run)), base_url="http://localhost") as client:
        reply = client.get("/api/run")
        assert reply.json()["settings"] == {"temperature": None, "max_steps": 3} and "NaN" not in reply.text
        rows = client.get("/api/sessions", params={"sort": "rollout"}).json()["rows"]
        assert (rows[0]["advantage"], rows[0]["step"]) == (None, 2)


@pytest.mark.parametrize(("content", "reason"), [('{"model": "m", ', "Expecting"), ("[1]", "no JSON object")])
def test_settings_that_cannot_be_read_are_named(run: Path, content: str, reason: str) -> None:
    (run / "settings.json").write_text(content)
    with TestClient(build_app(RunFolder(run)), base_url="http://localhost") as client:
        told = client.get("/api/run").json()
    problem = f"{run / 'settings.json'} cannot be read ("
    assert told["settings_problem"].startswith(problem) and reason in told["settings_problem"]
    assert problem in told["vocabulary"]["note"] and "does not say its model" not in told["vocabulary"]["note"]


def test_a_fault_in_an_answer_is_told_and_ends_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(run)
    counted: list[int] = []

    def fail() -> list[Any]:
        counted.append(1)
        raise ZeroDivisionError("odd")

    with TestClient(build_app(folder), base_url="http://localhost", raise_server_exceptions=False) as client:
        monkeypatch.setattr(folder.sessions, "refresh", fail)
        reply = client.get("/api/sessions")
        assert (reply.status_code, reply.json()) == (500, {"error": "ZeroDivisionError: odd"})
        monkeypatch.undo()
        assert client.get("/api/sessions").status_code == 200


def test_the_counter_goes_on_after_a_fault(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_session(run, "late", [build_call("late", 0, (1,), (2,))], summary=False)
    folder = RunFolder(run)
    count, faults = folder.sessions.count_next, [OSError("gone"), ZeroDivisionError("odd")]
    monkeypatch.setattr(folder.sessions, "count_next", lambda: _raise(faults.pop()) if faults else count())
    with TestClient(build_app(folder), base_url="http://localhost") as client:
        deadline = time.monotonic() + 30
        while client.get("/api/run").json()["choices"]["num_uncounted"] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert client.get("/api/run").json()["choices"]["num_uncounted"] == 0 and faults == []


def _raise(error: Exception) -> bool:
    raise error


def test_a_run_that_is_continued_is_live_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LOOK_S", 0.0)
    now_s = time.time()

    def age(path: Path, seconds: float) -> None:
        os.utime(path, (now_s - seconds, now_s - seconds))

    age(write_session(tmp_path, "cut", [], finish=False), 300)
    log, summary = tmp_path / "log.jsonl", tmp_path / "summary.json"
    log.write_text('{"step": 2, "reward": 1.0}\n')
    age(log, 200)
    folder = RunFolder(tmp_path)
    assert folder.is_live(), "no summary yet"
    summary.write_text("{}")
    age(summary, 100)
    assert not folder.is_live(), "all was written before the summary"
    path = write_session(tmp_path, "next", [], finish=False, batch="train_00002")
    assert folder.is_live(), "a session that is open"
    path.unlink()
    age(write_session(tmp_path, "done", [], batch="train_00002"), 50)
    assert RunFolder(tmp_path).is_live(), "a session after the summary, though none is open"
    age(summary, 10)
    assert not RunFolder(tmp_path).is_live()
    log.write_text('{"step": 3, "reward": 1.0}\n')
    assert RunFolder(tmp_path).is_live(), "a line of the log after the summary"
    (tmp_path / "settings.json").write_text('{"max_steps": 3}')
    assert not RunFolder(tmp_path).is_live(), "the last step is done and no session is open"
