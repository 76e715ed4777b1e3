"""Run a small setting of `bench_overlap.py` with the trainer on real ranks, under torch's launcher.

Arguments: SETTING (JSON of a `Setting`), SCALE (real seconds of one of its own), MODEL (a folder), OUT (written by
rank 0).

Runner, proxy, gate, vLLM, rewards, packing, backward passes, optimizer and weight pushes are the trainer's. Agents are
threads that hold a conversation over HTTP. Calls, tools and training steps are made as long as the setting says:
what they really take is part of that time.
"""

import asyncio
import http.client
import json
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_overlap import Session, Setting, SlotClock, draw_session, share_lags

from polar_trl.engine.base import GenerationParams
from polar_trl.grade.function import FunctionGrader
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.trainer import PolarGRPOTrainer
from polar_trl.harness.shell import ShellHarness
from polar_trl.rollout.runner import RolloutResult
from polar_trl.sandbox.base import Capabilities, ExecResult, SandboxBackend
from polar_trl.types import Completion, Task, TokenIds


class ThreadSandbox:
    """What a session needs of a `Sandbox` whose agent is a function of this process."""

    host_workdir = Path("no-such-folder")
    base_tree = None

    def __init__(self, session: Session, scale: float) -> None:
        self.session = session
        self._scale = scale
        self._killed = threading.Event()
        self._connection: http.client.HTTPConnection | None = None

    def run(self, command: str, *, env: Mapping[str, str], timeout_s: float) -> ExecResult:
        """Ask, then sleep as long as the tool takes, until it is done or killed."""
        started = time.monotonic()
        self._connection = http.client.HTTPConnection(env["OPENAI_BASE_URL"].split("/")[2])
        with suppress(OSError, http.client.HTTPException):  # it was killed while it waited for an answer
            self._converse({"Authorization": "Bearer " + env["OPENAI_API_KEY"]})
        self._connection.close()
        exit_code = None if self._killed.is_set() else 0
        seconds = time.monotonic() - started
        return ExecResult(exit_code=exit_code, stdout="", stderr="", timed_out=False, seconds=seconds)

    def _converse(self, headers: dict[str, str]) -> None:
        messages: list[dict[str, str]] = []
        for call, tool_s in enumerate(self.session.tools_s):
            messages.append({"role": "user", "content": f"session {self.session.number} call {call}."})
            self._connection.request("POST", "/v1/chat/completions", json.dumps({"messages": messages}), headers)
            reply = json.loads(self._connection.getresponse().read())
            messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
            if self._killed.wait(tool_s * self._scale):
                break

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """This process has its folders, which are none."""
        return function(self, *arguments)

    def put(self, path: str, content: bytes, *, executable: bool = False) -> None:
        """Nothing is kept."""

    def open_listener(self) -> None:
        """It shares the host's network."""

    def require_whole(self) -> None:
        """Nothing is there to be changed."""

    def kill(self) -> None:
        """End the tool that runs, and take the agent off the line."""
        self._killed.set()
        if self._connection is not None and self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    destroy = kill


class ThreadBackend(SandboxBackend):
    """Makes a `ThreadSandbox` in as long as its session drew."""

    capabilities = Capabilities(cuts_network=False, limits_memory=False, limits_disk=False, uses_images=False)

    def __init__(self, setting: Setting, scale: float) -> None:
        self._setting = setting
        self._scale = scale

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Nothing to fetch."""

    def create(self, task: Task, session_id: str) -> ThreadSandbox:
        """The agent of a session, whose number follows from its group and its place there."""
        number = int(task.id) * self._setting.group_size + int(session_id.rsplit("-r", 1)[1])
        session = draw_session(self._setting, number)
        time.sleep(session.prepare_s * self._scale)
        return ThreadSandbox(session, self._scale)

    def close(self) -> None:
        """Nothing is held."""


class PacedTrainer(PolarGRPOTrainer):
    """Makes each call and each training step as long as a setting says, and measures in the setting's seconds."""

    def __init__(self, setting: Setting, scale: float, **arguments: Any) -> None:
        self._setting = setting
        self._scale = scale
        self._clock = SlotClock(time.monotonic)
        self._lags: Counter[int] = Counter()
        self._released_s = self._held_s = self._train_s = 0.0
        self._taken: list[RolloutResult] = []
        self.steps: list[dict[str, float]] = []
        self.num_calls = self.num_late_calls = self.num_late_steps = 0
        """Calls, and those and training steps that really took longer than they were to."""
        super().__init__(**arguments)
        self._run_rollouts, self.rollouts.run = self.rollouts.run, self._take  # type: ignore[method-assign]
        self._release, self.proxy.release = self.proxy.release, self._release_later  # type: ignore[method-assign]
        self._hold, self.proxy.hold = self.proxy.hold, self._hold_and_measure  # type: ignore[method-assign]

    def _build_proxy(self) -> Any:
        engine = self.vllm_generation.engine
        self._slots, self._sample = asyncio.Semaphore(self._setting.slots), engine.generate
        engine.generate = self._generate  # type: ignore[method-assign]
        return super()._build_proxy()

    async def _generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        """Sample in one of the engine's slots, for as long as the call is to take."""
        asks = re.findall(r"session (\d+) call (\d+)\.", self.trl.tokenizer.decode(prompt_ids))
        if not asks:  # the engine is compared with the trainer
            return await self._sample(prompt_ids, params)
        number, call = map(int, asks[-1])
        async with self._slots:
            sampled = draw_session(self._setting, number).sampled[call]
            ends_s = time.monotonic() + sampled * self._setting.step_s * self._scale
            self._clock.add(+1)
            completion = await self._sample(prompt_ids, params)
            self.num_calls += 1
            self.num_late_calls += time.monotonic() > ends_s
            await asyncio.sleep(ends_s - time.monotonic())
            self._clock.add(-1)
        return completion

    def _take(self, inputs: Any, mode: str) -> list[RolloutResult]:
        self._taken = self._run_rollouts(inputs, mode)
        return self._taken

    def _hold_and_measure(self) -> None:
        self._hold()
        gather, setting = self.rollouts.runner.ranks.gather, self._setting
        self._held_s = max(gather(time.monotonic()))
        self._clock.add(0)
        slot_seconds, self._clock.slot_seconds = self._clock.slot_seconds, 0.0
        num_tokens = 0
        for result in self._taken:
            session = draw_session(setting, find_number(result, setting))
            num_tokens += setting.prompt_tokens
            for call, sampled in zip(result.rollout.calls, session.sampled, strict=True):
                self._lags[self.proxy.policy_version - call.completion.first_policy_version] += sampled
                num_tokens += sampled + setting.observed_tokens
        self._train_s = sum(gather(num_tokens)) / setting.num_ranks / setting.train_tokens_per_s * self._scale
        rollout_s = self._held_s - self._released_s
        self.steps.append({"rollout_s": rollout_s, "slot_seconds": sum(gather(slot_seconds))})

    def finish_training(self) -> None:
        """Before the optimizer's step: wait until the training is over that a step of the setting takes."""
        self._sleep_until(self._held_s + self._train_s)

    def _release_later(self) -> None:
        if self.steps:
            self._sleep_until(self._held_s + self._train_s + self._setting.sync_s * self._scale)
        self._release()
        self._released_s = max(self.rollouts.runner.ranks.gather(time.monotonic()))

    def _sleep_until(self, when_s: float) -> None:
        left_s = when_s - time.monotonic()
        self.num_late_steps += left_s < 0
        time.sleep(max(0.0, left_s))

    def summarize(self) -> dict[str, Any]:
        """Return figures as of `Run.run`, of all ranks, in seconds of the setting (a collective)."""
        setting, gather, steps = self._setting, self.rollouts.runner.ranks.gather, self.steps[1:]
        rollout_s = sum(step["rollout_s"] for step in steps)
        slots = setting.slots * setting.num_ranks
        # the package's own clock
        log = [entry["polar/phase/step_s"] for entry in self.state.log_history if "polar/phase/step_s" in entry]
        return {
            "name": setting.name,
            "seconds_per_step": sum(log[1:]) / len(log[1:]) / self._scale,
            "rollout_s": rollout_s / len(steps) / self._scale,
            "slots_in_rollout": sum(step["slot_seconds"] for step in steps) / (slots * rollout_s),
            "policy_lag": share_lags(sum(gather(self._lags), Counter[int]())),
            "late_calls": sum(gather(self.num_late_calls)) / sum(gather(self.num_calls)),
            "late_steps": self.num_late_steps,
            "loss": [entry["loss"] for entry in self.state.log_history if "loss" in entry],
            "steps": self.steps,
        }


class Pace(TrainerCallback):
    """Ends the training of each step when the setting says, and the run after its steps."""

    trainer: PacedTrainer

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """The backward passes are done."""
        self.trainer.finish_training()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the last step, which would begin no batch."""
        control.should_training_stop = state.global_step >= self._num_steps


def find_number(result: RolloutResult, setting: Setting) -> int:
    """Return the number of a session."""
    return int(result.rollout.task_id) * setting.group_size + int(result.rollout.id.rsplit("-r", 1)[1])


def build_trainer(setting: Setting, scale: float, model: str, folder: Path, pace: Pace) -> PacedTrainer:
    """Build the trainer of one rank."""

    def grade(task: Task, sandbox: Any) -> float:
        time.sleep(sandbox.session.grade_s * scale)
        return sandbox.session.number % 3 / 2

    return PacedTrainer(
        setting,
        scale,
        model=model,
        args=PolarGRPOConfig(
            output_dir=str(folder / "run"),
            per_device_train_batch_size=setting.num_groups * setting.group_size // setting.num_ranks,
            gradient_accumulation_steps=1,
            num_generations=setting.group_size,
            max_steps=setting.steps + 1,
            max_completion_length=4,
            vllm_max_model_length=2048,
            engine_max_num_seqs=setting.slots,
            max_agents=setting.max_agents,
            max_preparing=setting.max_preparing,
            max_grading=setting.max_grading,
            max_policy_lag=setting.max_policy_lag,
            save_strategy="no",
            shuffle_dataset=False,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=[
            Task(id=str(group), instruction="x", agent_timeout_s=1e6)
            for group in range(setting.num_groups * (setting.steps + 2))
        ],
        callbacks=[pace],
        harness=ShellHarness("agent"),
        sandbox=ThreadBackend(setting, scale),
        grader=FunctionGrader(grade),
    )


def main() -> None:
    """Run one rank."""
    values, scale, model, out = json.loads(sys.argv[1]), float(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    setting = Setting(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    pace = Pace(setting.steps)
    pace.trainer = trainer = build_trainer(setting, scale, model, out.parent, pace)
    trainer.train()
    figures = trainer.summarize()
    if trainer.accelerator.is_main_process:
        out.write_text(json.dumps(figures))
    trainer.close()


if __name__ == "__main__":
    main()
