"""Test the quickstart's agent, as a process of its own, against the real proxy with scripted replies."""

import runpy
import subprocess
import sys
import threading
import time
import tracemalloc
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.proxy import Proxy
from polar_trl.recording.log import SessionLog
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Message

AGENT = Path(__file__).resolve().parents[2] / "polar_trl" / "configs" / "agents" / "shell_agent.py"


def run_agent(
    tmp_path: Path, replies: list[str], *options: str, key: str | None = None, instruction: str = "make out.txt"
) -> tuple[object, SessionLog]:
    renderer = ByteRenderer()
    engine = ScriptedEngine([renderer.spell(Message(role="assistant", text=reply)) for reply in replies])
    log = SessionLog(session_id="s", task_id="t", group_id="g")
    with Proxy(engine, renderer, params=GenerationParams(max_tokens=200)) as proxy:
        endpoint = proxy.open_session(log)
        env = {
            "PATH": "/usr/bin:/bin",
            "OPENAI_BASE_URL": f"{endpoint.origin}/v1",
            "OPENAI_API_KEY": key or endpoint.api_key,
            "OPENAI_MODEL": endpoint.model,
        }
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(AGENT), *options, instruction],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
        )
    return done, log


def test_one_command_is_enough(tmp_path: Path) -> None:
    done, log = run_agent(tmp_path, ["```bash\necho hi > out.txt\n```"])
    assert done.returncode == 0
    assert (tmp_path / "out.txt").read_text() == "hi\n"
    assert log.calls[0].request.messages[-1].text == "make out.txt"


def test_a_missing_closing_fence_is_forgiven(tmp_path: Path) -> None:
    done, _ = run_agent(tmp_path, ["Sure:\n```sh\ntouch out.txt"])
    assert done.returncode == 0
    assert (tmp_path / "out.txt").exists()


def test_it_asks_again_after_a_failure_and_continues_the_conversation(tmp_path: Path) -> None:
    done, log = run_agent(tmp_path, ["no code here", "```bash\ncat nothing\n```", "```bash\ntrue\n```"])
    assert done.returncode == 0
    assert [call.parent for call in log.calls] == [None, 0, 1]
    assert "no bash code block" in log.calls[1].request.messages[-1].text
    assert "Exit code 1" in log.calls[2].request.messages[-1].text


def test_it_gives_up(tmp_path: Path) -> None:
    done, log = run_agent(tmp_path, ["```bash\nfalse\n```"] * 2, "--max-turns", "2")
    assert done.returncode == 1
    assert done.stderr == "shell_agent: no command succeeded in 2 tries; the last: Exit code 1: \n"
    assert len(log.calls) == 2


def test_each_line_is_a_request_in_one_conversation(tmp_path: Path) -> None:
    replies = ["```bash\ntouch a\n```", "```bash\nfalse\n```", "```bash\ntouch b\n```"]
    options = ("--each-line", "--max-turns", "1")
    done, log = run_agent(tmp_path, replies, *options, instruction="make a\nfail\nmake b")
    assert done.returncode == 1 and (tmp_path / "b").exists()
    assert [call.parent for call in log.calls] == [None, 0, 1]
    assert [call.request.messages[-1].text for call in log.calls] == ["make a", "fail", "make b"]


@pytest.mark.parametrize(("key", "message"), [("wrong", "401: unknown API key")])
def test_a_refusal_is_passed_on(tmp_path: Path, key: str, message: str) -> None:
    done, _ = run_agent(tmp_path, [], key=key)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_flood_costs_no_memory_and_keeps_its_end() -> None:
    run = runpy.run_path(str(AGENT))["run"]
    tracemalloc.start()
    exit_code, output = run("head -c 2000000 /dev/zero | tr '\\0' a; echo; echo ünd; exit 3")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (exit_code, output) == (3, "a" * 396 + "\nünd")
    assert peak < 1_000_000


@pytest.mark.parametrize("command", ["echo a; sleep 3011; true", "exec >&- 2>&-; sleep 3012; true"])
def test_a_slow_command_ends_at_its_limit(command: str) -> None:
    run = runpy.run_path(str(AGENT))["run"]
    run.__globals__["TIME_LIMIT_S"] = 0.3
    assert run(command) == (124, "it ran longer than 0.3 seconds")
    child = f"sleep\0{command.split()[-2].rstrip(';')}\0".encode()
    # killed, it may be there a moment longer; one that was not killed fails by pytest's own timeout
    while any(_read(path) == child for path in Path("/proc").glob("[0-9]*/cmdline")):
        time.sleep(0.01)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended while we looked
        return b""


class _Canned(BaseHTTPRequestHandler):
    """Answers every request with the server's `canned` status and body."""

    def do_POST(self) -> None:
        status, body = self.server.canned  # type: ignore[attr-defined]
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the terminal."""


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (502, b"<html>bad gateway</html>", "answered 502: <html>bad gateway"),
        (500, b'{"error": {"message": "engine died"}}', "answered 500: engine died"),
        (200, b"[1]", "answered 200: [1]"),
        (200, b'{"choices": []}', "answered 200: {"),
    ],
)
def test_an_endpoint_that_fails_is_named(tmp_path: Path, status: int, body: bytes, message: str) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Canned)
    server.canned = (status, body)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    env = {"PATH": "/usr/bin:/bin", "OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_port}/v1"}
    command = [sys.executable, "-I", "-S", str(AGENT), "x"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    thread.join()
    server.server_close()
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_an_endpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "OPENAI_BASE_URL": "http://127.0.0.1:1/v1"}
    command = [sys.executable, "-I", "-S", str(AGENT), "x"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert "no answer from 127.0.0.1:1" in done.stderr
