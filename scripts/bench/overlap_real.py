"""A setting of `bench_overlap.py` -> the same figures from the real runner, proxy and gate, with time scaled down.

Agents are threads that send real HTTP requests and sleep in place of tools; the engine sleeps in place of sampling, in
so many slots. It refuses what it cannot imitate: a prefill that takes time, and a decoding step that depends on how
many decode.
"""

import asyncio
import http.client
import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_overlap import Setting, Sim, draw_session

from polar_trl.engine.base import GenerationParams, TokenEngine
from polar_trl.grade.function import FunctionGrader
from polar_trl.harness.shell import ShellHarness
from polar_trl.proxy import Proxy
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutResult, RolloutRunner
from polar_trl.sandbox.base import Capabilities, ExecResult, SandboxBackend
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Completion, Message, Task, TokenIds

RENDERER = ByteRenderer()
REPLY = RENDERER.spell(Message(role="assistant", text=""))


class SleepingEngine(TokenEngine):
    """Answers so many requests at once, each as long as its session drew."""

    max_model_len = 1_000_000
    policy_version = 0

    def __init__(self, setting: Setting, scale: float) -> None:
        self._setting = setting
        self._scale = scale
        self._slots = asyncio.Semaphore(setting.slots)
        self._num_running = 0
        self._since = time.monotonic()
        self._slot_seconds = 0.0
        self._lock = threading.Lock()

    def read_slot_seconds(self) -> float:
        """Scaled seconds of slots in use until now."""
        self._count(0)
        return self._slot_seconds

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        """An empty answer, after a while."""
        number, call = find_call(prompt_ids)
        sampled = draw_session(self._setting, number).sampled[call]
        async with self._slots:
            version = self.policy_version
            self._count(+1)
            await asyncio.sleep(sampled * self._setting.step_s * self._scale)
            self._count(-1)
        return Completion(
            token_ids=REPLY,
            logprobs=(-1.0,) * len(REPLY),
            finish_reason="stop",
            first_policy_version=version,
            last_policy_version=self.policy_version,
        )

    def _count(self, change: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._slot_seconds += (now - self._since) * self._num_running
            self._since, self._num_running = now, self._num_running + change


def find_call(prompt_ids: TokenIds) -> tuple[int, int]:
    """Which session asks, and for which of its calls."""
    text = bytes(token_id for token_id in prompt_ids if token_id < 256).decode()
    match = re.search(r"session (\d+) call (\d+)", text)
    assert match is not None, text
    return int(match[1]), int(match[2])


class ThreadSandbox:
    """An agent that is a function of this process."""

    workdir = "/nowhere"
    host_workdir = host_home = Path(workdir)
    base_tree = None

    def __init__(self, session: Sim, scale: float) -> None:
        self._session = session
        self._scale = scale
        self._killed = threading.Event()

    def run(self, command: str, *, env: Mapping[str, str], timeout_s: float) -> ExecResult:
        """Ask, then sleep as long as the tool takes, until it is done or killed."""
        started = time.monotonic()
        host = env["OPENAI_BASE_URL"].split("/")[2]
        headers = {"Authorization": "Bearer " + env["OPENAI_API_KEY"]}
        connection = http.client.HTTPConnection(host)
        for call, tool_s in enumerate(self._session.tools_s):
            text = f"session {self._session.number} call {call}"
            body = json.dumps({"messages": [{"role": "user", "content": text}]})
            connection.request("POST", "/v1/chat/completions", body, headers)
            connection.getresponse().read()
            if self._killed.wait(tool_s * self._scale):
                break
        connection.close()
        exit_code = None if self._killed.is_set() else 0
        seconds = time.monotonic() - started
        return ExecResult(exit_code=exit_code, stdout="", stderr="", timed_out=False, seconds=seconds)

    def put(self, path: str, content: bytes) -> None:
        """Nothing is kept."""

    def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes | None:
        """Nothing is there."""
        return None

    def upload(self, source: Path, target: str) -> None:
        """Nothing is kept."""

    def open_listener(self) -> None:
        """It shares the host's network."""

    def is_alive(self) -> bool:
        """Always."""
        return True

    def kill(self) -> None:
        """At the end of the current call or tool."""
        self._killed.set()

    def destroy(self) -> None:
        """See `kill`."""
        self.kill()


class ThreadBackend(SandboxBackend):
    """Makes a `ThreadSandbox` in as long as its session drew."""

    capabilities = Capabilities(cuts_network=False, limits_memory=False, limits_disk=False, uses_images=False)

    def __init__(self, setting: Setting, scale: float) -> None:
        self._setting = setting
        self._scale = scale

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Nothing to fetch."""

    def create(self, task: Task, session_id: str) -> ThreadSandbox:
        """The agent of the session whose number is the task's id."""
        session = draw_session(self._setting, int(task.id))
        time.sleep(session.prepare_s * self._scale)
        return ThreadSandbox(session, self._scale)

    def close(self) -> None:
        """Nothing is held."""


def run_real(setting: Setting, scale: float) -> dict[str, Any]:
    """Figures as of `Run.run`, in seconds of the setting; `scale` real seconds are one of them."""
    if setting.step_s_per_sequence or math.isfinite(setting.prefill_tokens_per_s):
        raise ValueError("only a setting without prefill and with steps of one length can be imitated")
    engine = SleepingEngine(setting, scale)

    def grade(task: Task, box: Any) -> float:
        time.sleep(draw_session(setting, int(task.id)).grade_s * scale)
        return 1.0

    with Proxy(engine, RENDERER, params=GenerationParams(max_tokens=50)) as proxy:
        runner = RolloutRunner(
            proxy=proxy,
            backend=ThreadBackend(setting, scale),
            harness=ShellHarness("agent"),
            grader=FunctionGrader(grade),
            config=RolloutConfig(
                max_preparing=setting.max_preparing,
                max_agents=setting.oversubscription * setting.slots,
                max_grading=setting.max_grading,
                max_policy_lag=setting.max_policy_lag,
                straggler_quantile=setting.straggler_quantile,
            ),
        )
        try:
            return _train(setting, scale, engine, runner)
        finally:
            runner.close()


def _train(setting: Setting, scale: float, engine: SleepingEngine, runner: RolloutRunner) -> dict[str, Any]:
    num_started = 0

    def start_batch() -> None:
        nonlocal num_started
        numbers = range(num_started, num_started + setting.num_groups * setting.group_size)
        num_started = numbers.stop
        runner.start(
            [
                Job(
                    rollout_id=f"r{number}",
                    group_id=f"g{number // setting.group_size}",
                    task=Task(id=str(number), instruction="x", agent_timeout_s=1e6),
                )
                for number in numbers
            ]
        )

    lags: Counter[int] = Counter()
    steps_s, rollouts_s, busy_s = [], [], []
    for _ in range(setting.num_open):
        start_batch()
    for _ in range(setting.steps):
        begun, busy = time.monotonic(), engine.read_slot_seconds()
        groups = runner.take(setting.num_groups)
        runner.proxy.hold()
        rollouts_s.append(time.monotonic() - begun)
        busy_s.append(engine.read_slot_seconds() - busy)
        taken = [result for group in groups for result in group]
        time.sleep(_count(setting, taken, engine.policy_version, lags) * scale)
        engine.policy_version += 1
        runner.proxy.release()
        start_batch()
        steps_s.append(time.monotonic() - begun)
    tokens = sum(lags.values())
    return {
        "name": setting.name,
        "seconds_per_step": sum(steps_s[1:]) / scale / (setting.steps - 1),
        "rollout_s": sum(rollouts_s[1:]) / scale / (setting.steps - 1),
        "busy_in_rollout": sum(busy_s[1:]) / (setting.slots * sum(rollouts_s[1:])),
        "policy_lag": {str(lag): count / tokens for lag, count in sorted(lags.items())},
    }


def _count(setting: Setting, taken: Sequence[RolloutResult], version: int, lags: Counter[int]) -> float:
    """Seconds that training on these sessions takes; their tokens' lags are added to `lags`."""
    num_tokens = 0
    for result in taken:
        session = draw_session(setting, int(result.rollout.task_id))
        num_tokens += setting.prompt_tokens
        for call, sampled in zip(result.rollout.calls, session.sampled, strict=False):
            lags[version - call.completion.first_policy_version] += sampled
            num_tokens += sampled + setting.observed_tokens
    return setting.sync_s + num_tokens / setting.train_tokens_per_s
