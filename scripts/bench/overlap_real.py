"""Run a small setting of `bench_overlap.py` on real ranks, under torch's launcher.

Arguments: SETTING (JSON of a `Setting`), SCALE (real seconds of one of its own), OUT (written by rank 0).

Each rank has the real runner, proxy and gate, and the ranks are connected as the trainer's are. Agents are threads
that send real HTTP requests and sleep in place of tools; the engine sleeps in place of sampling, in so many slots.
"""

import asyncio
import http.client
import json
import math
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_overlap import Setting, Sim, draw_session

from polar_trl.engine.base import GenerationParams, TokenEngine
from polar_trl.grade.function import FunctionGrader
from polar_trl.grpo.rollouts.distributed import connect_ranks
from polar_trl.harness.shell import ShellHarness
from polar_trl.proxy import Proxy
from polar_trl.rollout.ranks import Ranks
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutResult, RolloutRunner
from polar_trl.sandbox.base import Capabilities, ExecResult, SandboxBackend
from polar_trl.tokens.bytes import ByteRenderer
from polar_trl.types import Completion, Message, Task, TokenIds

RENDERER = ByteRenderer()
REPLY = RENDERER.spell(Message(role="assistant", text=""))


class SleepingEngine(TokenEngine):
    """So many requests at once, each as long as its session drew."""

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
        """Return the seconds of slots in use until now, real ones."""
        self._count(0)
        return self._slot_seconds

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        """Give an empty answer, after a while."""
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
    """Return which session asks, and for which of its calls."""
    text = bytes(token_id for token_id in prompt_ids if token_id < 256).decode()
    match = re.search(r"session (\d+) call (\d+)", text)
    assert match is not None, text
    return int(match[1]), int(match[2])


class ThreadSandbox:
    """An agent that is a function of this process."""

    workdir = tempfile.gettempdir()
    host_workdir = host_home = Path(workdir) / "polar-trl-no-such-folder"
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

    def put(self, path: str, content: bytes, *, executable: bool = False) -> None:
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

    def require_whole(self) -> None:
        """Nothing is there to be changed."""

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


class Trainer:
    """One rank: takes groups, sleeps in place of training, and begins the next batch."""

    def __init__(self, setting: Setting, scale: float, ranks: Ranks) -> None:
        if setting.step_s_per_sequence or math.isfinite(setting.prefill_tokens_per_s):
            raise ValueError("only a setting without prefill and with steps of one length can be imitated")
        self._setting = setting
        self._scale = scale
        self._ranks = ranks
        self._engine = SleepingEngine(setting, scale)
        self._num_started = 0
        self._lags: Counter[int] = Counter()

    def run(self) -> dict[str, Any]:
        """Return figures as of `Run.run`, of all ranks, in seconds of the setting."""
        setting, scale = self._setting, self._scale

        def grade(task: Task, box: Any) -> float:
            time.sleep(draw_session(setting, int(task.id)).grade_s * scale)
            return 1.0

        with Proxy(self._engine, RENDERER, params=GenerationParams(max_tokens=50)) as proxy:
            runner = RolloutRunner(
                proxy=proxy,
                backend=ThreadBackend(setting, scale),
                harness=ShellHarness("agent"),
                grader=FunctionGrader(grade),
                config=RolloutConfig(
                    max_preparing=setting.max_preparing,
                    max_agents=setting.max_agents,
                    max_grading=setting.max_grading,
                    max_policy_lag=setting.max_policy_lag,
                    straggler_quantile=setting.straggler_quantile,
                ),
                ranks=self._ranks,
            )
            try:
                return self._train(runner)
            finally:
                runner.close()

    def _train(self, runner: RolloutRunner) -> dict[str, Any]:
        setting, scale, gather = self._setting, self._scale, self._ranks.gather
        steps_s, rollouts_s, busy_s = [], [], []
        for _ in range(setting.num_open):
            self._start_batch(runner)
        for _ in range(setting.steps):
            begun, busy = time.monotonic(), self._engine.read_slot_seconds()
            taken = runner.take(setting.num_groups)
            runner.proxy.hold()
            gather(None)
            rollouts_s.append(time.monotonic() - begun)
            busy_s.append(sum(gather(self._engine.read_slot_seconds() - busy)))
            time.sleep((setting.sync_s + sum(gather(self._count(taken))) / self._tokens_per_s()) * scale)
            self._engine.policy_version += 1
            gather(None)
            runner.proxy.release()
            self._start_batch(runner)
            steps_s.append(time.monotonic() - begun)
        lags = sum(gather(self._lags), Counter[int]())
        total_s, slots = sum(rollouts_s[1:]), setting.slots * self._ranks.num_ranks
        return {
            "name": setting.name,
            "seconds_per_step": sum(steps_s[1:]) / scale / (setting.steps - 1),
            "rollout_s": total_s / scale / (setting.steps - 1),
            "slots_in_rollout": sum(busy_s[1:]) / (slots * total_s),
            "policy_lag": {str(lag): count / lags.total() for lag, count in sorted(lags.items())},
        }

    def _tokens_per_s(self) -> float:
        return self._setting.train_tokens_per_s * self._ranks.num_ranks

    def _start_batch(self, runner: RolloutRunner) -> None:
        size = self._setting.group_size
        numbers = range(self._num_started, self._num_started + self._setting.num_groups * size)
        self._num_started = numbers.stop
        runner.start(
            [
                Job(
                    rollout_id=f"r{number}",
                    group_id=f"g{number // size}",
                    task=Task(id=str(number), instruction="x", agent_timeout_s=1e6),
                )
                for number in numbers
            ]
        )

    def _count(self, taken: Sequence[RolloutResult]) -> int:
        """Return the tokens of sessions that are trained; their tokens' lags are noted."""
        num_tokens = 0
        for result in taken:
            session = draw_session(self._setting, int(result.rollout.task_id))
            num_tokens += self._setting.prompt_tokens
            for call, sampled in zip(result.rollout.calls, session.sampled, strict=False):
                self._lags[self._engine.policy_version - call.completion.first_policy_version] += sampled
                num_tokens += sampled + self._setting.observed_tokens
        return num_tokens


def main() -> None:
    """Run one rank."""
    values, scale, out = json.loads(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    setting = Setting(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    dist.init_process_group("gloo")
    figures = Trainer(setting, scale, connect_ranks(setting.num_ranks, timeout_s=1800)).run()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
