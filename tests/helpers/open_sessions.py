"""Run sessions that stay open over a policy change: real proxy, sockets and local sandboxes, and a scripted engine.

`open_sessions.py ROOT` fails with a session open, as a program that crashes does.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving import wait_until

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.gate import GateStats
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.grade.function import FunctionGrader
from polar_trl.harness.shell import ShellHarness
from polar_trl.proxy import Proxy
from polar_trl.rollout.ranks import Ranks
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutRunner
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Message, Task

RENDERER = ByteRenderer()
REPLY = RENDERER.spell(Message(role="assistant", text="done"))
ASK = """
import http.client, json, os, pathlib
chat = pathlib.Path("chat.json")
messages = json.loads(chat.read_text()) if chat.exists() else []
messages.append({"role": "user", "content": "go on"})
connection = http.client.HTTPConnection(os.environ["OPENAI_BASE_URL"].split("/")[2], timeout=2.0)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
connection.request("POST", "/v1/chat/completions", json.dumps({"messages": messages, "stream": True}), headers)
answer = connection.getresponse().read()  # raises after 2.0 s without a byte
assert b"[DONE]" in answer, answer
chat.write_text(json.dumps([*messages, {"role": "assistant", "content": "done"}]))
"""
"""One more turn of the agent's conversation. It fails after 2 s without a byte."""
TURN = "python3 -I -S ~/ask.py"


class OpenSessions:
    """A runner whose agents are shell scripts, its proxy and its engine."""

    def __init__(self, root: Path, runner: RolloutRunner, engine: ScriptedEngine) -> None:
        self.runner = runner
        self.proxy = runner.proxy
        self.engine = engine
        self._root = root

    def build_wait(self, name: str) -> str:
        """Build the shell command that waits until the file is there."""
        return f"while ! test -e {self._root / name} ; do sleep 0.02; done"

    def start_group(self, group_id: str, *scripts: str, **task: Any) -> None:
        """Start a session per script."""
        self.runner.start(
            [
                Job(
                    rollout_id=f"{group_id}-r{index}",
                    group_id=group_id,
                    task=Task(id="t", instruction=script, **task),
                    record_path=self._root / f"{group_id}-r{index}.jsonl",
                )
                for index, script in enumerate(scripts)
            ]
        )

    def wait_for_calls(self, count: int) -> None:
        """Wait until the engine has been asked that often in all."""
        wait_until(lambda: len(self.engine.params) >= count)

    def gate_stats(self) -> list[GateStats]:
        return [member.session.gate_stats for group in self.runner._groups for member in group.members.values()]

    def wait_until_held(self) -> None:
        """Wait until a call of every open session waits at the gate."""
        wait_until(lambda: all(stats.held_s > 0.0 for stats in self.gate_stats()))

    def change_policy(self) -> None:
        """Let the engine have new weights, and go on."""
        self.engine.policy_version += 1
        self.proxy.release()


@contextmanager
def open_sessions(
    root: Path,
    *,
    grade: Callable[..., Any] = lambda task, box: 1.0,
    reply: Callable[..., Any] = lambda prompt: REPLY,
    ranks: Ranks | None = None,
    seen: Path | None = None,
    **config: Any,
) -> Iterator[OpenSessions]:
    engine = ScriptedEngine(reply)
    with Proxy(engine, RENDERER, params=GenerationParams(max_tokens=50), ping_interval_s=0.1) as proxy:
        runner = RolloutRunner(
            proxy=proxy,
            backend=LocalSandboxBackend(root / "boxes", mounts=[seen or root]),  # agents look for a test's files
            harness=ShellHarness("bash -ec {instruction}", files={"ask.py": ASK}),
            grader=FunctionGrader(grade),
            config=RolloutConfig(**config),
            ranks=ranks,
        )
        try:
            yield OpenSessions(root, runner, engine)
        finally:
            runner.close()
    assert list((root / "boxes").glob("*")) == [], "a sandbox was left behind"


if __name__ == "__main__":
    left_open = open_sessions(Path(sys.argv[1]))
    sessions = left_open.__enter__()  # and never closed
    sessions.proxy.hold()
    sessions.start_group("g", TURN)
    sessions.wait_until_held()
    raise SystemExit(7)
