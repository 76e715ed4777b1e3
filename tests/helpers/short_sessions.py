"""Run sessions of one call each: a shell harness, a scripted engine, the real proxy and local sandboxes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.grade.function import FunctionGrader
from polar_trl.harness.shell import ShellHarness
from polar_trl.proxy import Proxy
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutRunner
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Message, Task

RENDERER = ByteRenderer()
REPLY = RENDERER.spell(Message(role="assistant", text="done"))
CALL = (
    'python3 -I -S -c \'import http.client, os; c = http.client.HTTPConnection(os.environ["OPENAI_BASE_URL"]'
    '.split("/")[2]); c.request("POST", "/v1/chat/completions", "{\\"messages\\": [{\\"role\\": \\"user\\", '
    '\\"content\\": \\"hi\\"}]}", {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}); '
    "print(c.getresponse().status)'"
)


@contextmanager
def runner(
    tmp_path: Path,
    grade: Callable[..., Any] = lambda task, box: 1.0,
    *,
    harness: ShellHarness | None = None,
    reply: Callable[..., Any] = lambda prompt: REPLY,
    **config: Any,
) -> Iterator[RolloutRunner]:
    engine = ScriptedEngine(reply)
    with Proxy(engine, RENDERER, params=GenerationParams(max_tokens=50)) as proxy:
        yield RolloutRunner(
            proxy=proxy,
            backend=LocalSandboxBackend(tmp_path / "boxes"),
            harness=harness or ShellHarness(CALL),
            grader=FunctionGrader(grade),
            config=RolloutConfig(**config),
        )
    assert list((tmp_path / "boxes").glob("*")) == [], "a sandbox was left behind"


def jobs(tmp_path: Path, count: int, **task: Any) -> list[Job]:
    return [
        Job(
            rollout_id=f"r{i}",
            group_id="g",
            task=Task(id="t", instruction="x", **task),
            record_path=tmp_path / f"r{i}.jsonl",
        )
        for i in range(count)
    ]
