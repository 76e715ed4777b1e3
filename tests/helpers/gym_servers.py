"""Start NeMo Gym's own servers by its command line, and a model server that answers as vLLM's does.

Gym would make an environment of about 1 GB for each of its servers; here all of them have the one of get_gym.py.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from get_gym import FOLDER
from openai_servers import serve_app
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "nemo_gym"
SERVERS = (
    *("responses_api_agents/polar_agent", "responses_api_agents/simple_agent"),
    *("responses_api_models/vllm_model", "resources_servers/mcqa"),
)
LOGPROB = -0.5
MARK = "POLAR_TEST_OF_GYM"


def find_rows() -> Path:
    """Find the example rows that Gym bundles with its multiple choice environment."""
    assert (FOLDER / "installed").exists(), "run scripts/dev/get_gym.py first (scripts/test.sh does)"
    (path,) = FOLDER.glob("lib/python*/site-packages/resources_servers/mcqa/data/example.jsonl")
    return path


@contextmanager
def serve_scripted_vllm(choose: Callable[[str], str]) -> Iterator[str]:
    """Serve a chat model with vLLM's ids and logprobs, a token per byte; give the address, with /v1.

    Args:
        choose: From the conversation as text to the answer.
    """

    async def complete(request: Request) -> Response:
        body = await request.json()
        text = choose(_spell(body))
        tokens = [*text.encode(), 0]
        logprobs = [{"token": f"token_id:{i}", "logprob": LOGPROB, "bytes": [i], "top_logprobs": []} for i in tokens]
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": logprobs}}
        num_prompt = len(_encode(body))
        usage = {"prompt_tokens": num_prompt, "completion_tokens": len(tokens)}
        usage["total_tokens"] = num_prompt + len(tokens)
        answer = {"id": "c", "object": "chat.completion", "created": 0, "model": "small", "usage": usage}
        return JSONResponse({**answer, "choices": [choice]})

    async def tokenize(request: Request) -> Response:
        return JSONResponse({"tokens": _encode(await request.json())})

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "small", "max_model_len": 8192}]})

    routes = {"/v1/chat/completions": complete, "/tokenize": tokenize, "/v1/models": models}
    with serve_app(routes) as url:
        yield f"{url}/v1"


def _spell(body: dict[str, Any]) -> str:
    def read(content: Any) -> str:
        return content if isinstance(content, str) else "".join(part["text"] for part in content)

    turns = [f"{message['role']}:{read(message['content'])}\0" for message in body["messages"]]
    return "".join([*turns, "assistant:"])


def _encode(body: dict[str, Any]) -> list[int]:
    return list(_spell(body).encode())


@dataclass(frozen=True, kw_only=True)
class Gym:
    """Gym's servers, which run."""

    folder: Path
    """In which its commands are run; a copy of the example."""
    head: str
    """Address of its head server."""
    flags: tuple[str, ...]
    """By which its commands find the head server."""
    env: dict[str, str]

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command of Gym's to its end."""
        return subprocess.run(
            [str(FOLDER / "bin" / "gym"), *words, *self.flags],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=300,
        )


@contextmanager
def start_gym(folder: Path, model_url: str, **settings: object) -> Iterator[Gym]:
    """Start `gym env start` with the multiple choice environment and our agent; stop it, and nothing may be left.

    Args:
        folder: Does not exist.
        settings: Of the agent's run file, over those of the example.
    """
    shutil.copytree(EXAMPLE, folder)
    run_file = folder / "responses_api_agents" / "polar_agent" / "run.yaml"
    run_file.write_text(yaml.safe_dump(yaml.safe_load(run_file.read_text()) | settings))
    for name in SERVERS:
        venv = folder / "venvs" / name / ".venv"
        venv.parent.mkdir(parents=True)
        venv.symlink_to(FOLDER)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ("+head_server.host=127.0.0.1", f"+head_server.port={port}")
    env = {**os.environ, MARK: str(folder), "PATH": f"{FOLDER / 'bin'}:{os.environ['PATH']}"}
    env["POLAR_TRL"] = str(Path(sys.executable).with_name("polar-trl"))
    command = [str(FOLDER / "bin" / "gym"), "env", "start", "--resources-server", "mcqa", "--model-type", "vllm_model"]
    command += ["--model", "small", "--model-url", model_url, "--model-api-key", "none"]
    command += ["--config", "responses_api_agents/polar_agent/configs/polar_agent.yaml", *flags]
    command += ["+skip_venv_if_present=true", f"+uv_venv_dir={folder / 'venvs'}"]
    command += ["++policy_model.responses_api_models.vllm_model.return_token_id_information=true"]
    log = folder / "gym.log"
    with log.open("wb") as file:
        started = subprocess.Popen(command, cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 240
        while "servers ready!" not in log.read_text():
            assert started.poll() is None and time.monotonic() < deadline, log.read_text()[-6000:]
            time.sleep(0.5)
        yield Gym(folder=folder, head=f"http://127.0.0.1:{port}", flags=flags, env=env)
    finally:
        started.send_signal(signal.SIGINT)
        started.wait(timeout=120)
        deadline = time.monotonic() + 60
        while (left := _list_started(folder)) and time.monotonic() < deadline:
            time.sleep(0.5)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left, f"{len(left)} processes outlived `gym env start`"


def _list_started(folder: Path) -> list[int]:
    """List the processes that have the mark of this start in their environment."""
    mark, found = f"{MARK}={folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or is somebody else's
            continue
    return found
