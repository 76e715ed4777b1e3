"""The real agents against a tiny Qwen3.5 of random weights, sampled by vLLM's CPU build: noise all the way.

Nothing is scripted here but the weights. Whatever an agent makes of noise, its session ends and is graded, the record
holds exactly what the engine sampled, and the trajectories obey the laws. What the model says leans towards markup
(see `tiny_qwen`), so that agents get whole answers, cut ones, and calls of a tool that they do not have.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_qwen import CALLING, build_tiny_qwen35
from tiny_vllm import build_tiny_vllm

from polar_trl.engine.base import GenerationParams, TokenEngine
from polar_trl.grade.command import CommandGrader
from polar_trl.harness import AGENTS, build_agent
from polar_trl.proxy import Proxy
from polar_trl.reconstruct.laws import check_laws
from polar_trl.reconstruct.merge import digest
from polar_trl.recording.log import read_record
from polar_trl.recording.session import SessionLimits
from polar_trl.rollout.runner import Job, RolloutConfig, RolloutResult, RolloutRunner
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.tokens.families import FamilyRenderer
from polar_trl.tokens.load import load_renderer
from polar_trl.types import Call, Completion, Task, TokenIds

MAX_MODEL_LEN = 1 << 17
PARAMS = GenerationParams(max_tokens=48, temperature=1.0)
SEEDS = (0, 1)
LIMITS = SessionLimits(max_calls=6)
TASK = Task(
    id="noise",
    instruction="Write the word hello into the file hello.txt.",
    agent_timeout_s=90.0,
    grader="test ! -e hello.txt",  # which noise does not write
)


class RecordingEngine(TokenEngine):
    """Passes everything on to the engine, and remembers what it sampled for what."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.max_model_len: int = engine.max_model_len
        self.sampled: list[tuple[TokenIds, Completion]] = []

    @property
    def policy_version(self) -> int:
        return int(self._engine.policy_version)

    async def generate(self, prompt_ids: TokenIds, params: GenerationParams) -> Completion:
        completion: Completion = await self._engine.generate(prompt_ids, params)
        self.sampled.append((prompt_ids, completion))
        return completion


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen35(smollm2, tmp_path_factory.mktemp("models") / "tiny-qwen35", leaning=CALLING)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Any]:
    """Start vLLM's engine thread, once for all agents."""
    llm = build_tiny_vllm(model, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=2048)
    from polar_trl.engine.vllm import VllmEngine

    engine = VllmEngine(llm)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def renderer(model: Path) -> FamilyRenderer:
    from transformers import AutoTokenizer

    renderer = load_renderer(AutoTokenizer.from_pretrained(model), str(model))
    assert isinstance(renderer, FamilyRenderer)
    assert renderer.family == "qwen3.5"
    return renderer


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One session, with what the engine sampled meanwhile and the file of its record."""

    finished: RolloutResult
    sampled: list[tuple[TokenIds, Completion]]
    record_path: Path


class Sessions:
    """Runs each session when it is first asked for."""

    def __init__(self, engine: Any, renderer: FamilyRenderer, folder: Path) -> None:
        self._engine = engine
        self._renderer = renderer
        self._folder = folder
        self._ran: dict[tuple[str, int], Ran] = {}

    def get(self, name: str, seed: int) -> Ran:
        if (name, seed) not in self._ran:
            self._ran[name, seed] = self._run(name, seed)
        return self._ran[name, seed]

    def _run(self, name: str, seed: int) -> Ran:
        harness = build_agent(name)
        harness.install()
        engine = RecordingEngine(self._engine)
        path = self._folder / f"{name}-{seed}.jsonl"
        # the sampler draws from the process's generator: the same noise for all, as far as requests come one by one
        torch.manual_seed(seed)
        started = time.monotonic()
        with Proxy(engine, self._renderer, params=PARAMS) as proxy:
            runner = RolloutRunner(
                proxy=proxy,
                backend=LocalSandboxBackend(),
                harness=harness,
                grader=CommandGrader(),
                config=RolloutConfig(limits=LIMITS),
            )
            job = Job(rollout_id=f"noise-{name}-{seed}", group_id="noise", task=TASK, record_path=path)
            finished = runner.run([job])[0]
        print(describe(finished, time.monotonic() - started))
        return Ran(finished=finished, sampled=engine.sampled, record_path=path)


@pytest.fixture(scope="module")
def sessions(engine: Any, renderer: FamilyRenderer, tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    return Sessions(engine, renderer, tmp_path_factory.mktemp("records"))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", AGENTS)
def test_a_session_of_noise_ends_is_graded_and_obeys_the_laws(
    name: str, seed: int, sessions: Sessions, renderer: FamilyRenderer
) -> None:
    ran = sessions.get(name, seed)
    rollout, reconstruction = ran.finished.rollout, ran.finished.reconstruction

    assert (rollout.error, rollout.reward) == (None, 1.0)
    assert rollout.stop_reason in ("completed", "agent_failed")  # of itself, not at its time limit
    calls = [call for call in rollout.calls if call.completion.token_ids]
    assert 0 < len(calls) <= LIMITS.max_calls
    # what was sampled is what is on record, in memory and on disk
    assert [(call.prompt_ids, call.completion) for call in calls] == ran.sampled
    record = read_record(ran.record_path)
    assert (record.finished, record.rollout) == (True, rollout)
    assert record.extra["trajectory_digest"] == digest(reconstruction.trajectories)

    for call in calls:
        check_completion(call, renderer)
    check_continuations(calls)
    check_laws(rollout, reconstruction)
    num_sampled = sum(len(call.completion.token_ids) for call in calls)
    num_trainable = sum(sum(trajectory.trainable) for trajectory in reconstruction.trajectories)
    assert num_trainable + sum(reconstruction.dropped.values()) == num_sampled
    assert num_trainable > 0


def test_most_agents_go_on_from_noise(sessions: Sessions) -> None:
    """Otherwise the tests above say little of continuations."""
    went_on = [
        name
        for name in AGENTS
        if any(call.parent is not None for seed in SEEDS for call in sessions.get(name, seed).finished.rollout.calls)
    ]
    assert len(went_on) > len(AGENTS) / 2, went_on


def test_the_logprobs_of_a_whole_session_are_the_models_own(sessions: Sessions, model: Path) -> None:
    """Over all turns, whose earlier states the engine took from its cache. It computes in bfloat16, hence the gap."""
    from transformers import AutoModelForCausalLM

    trajectories = [row for seed in SEEDS for row in sessions.get("pi", seed).finished.reconstruction.trajectories]
    trajectory = max(trajectories, key=lambda row: len(row.call_indices))
    assert len(trajectory.call_indices) > 1
    ids = torch.tensor([trajectory.token_ids])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    trainable = torch.tensor(trajectory.trainable[1:])
    gaps = (expected - torch.tensor(trajectory.logprobs[1:]))[trainable].abs()
    assert gaps.max() < 0.15


def check_completion(call: Call, renderer: FamilyRenderer) -> None:
    ids, logprobs = call.completion.token_ids, call.completion.logprobs
    assert all(math.isfinite(logprob) and logprob < 0.0 for logprob in logprobs)
    ended = [token in renderer.stop_token_ids for token in ids]
    assert not any(ended[:-1])
    if call.completion.finish_reason == "stop":
        assert ended[-1] or call.stop_text is not None
    else:
        assert not ended[-1]
        assert len(ids) <= PARAMS.max_tokens


def check_continuations(calls: list[Call]) -> None:
    """Check that a prompt continues the very tokens where an agent sends back its answer."""
    by_index = {call.index: call for call in calls}
    for call in calls:
        if call.parent is not None:
            assert goes_on(by_index[call.parent], call)
    for earlier, later in pairwise(calls):
        if sends_back(earlier, later):
            assert goes_on(earlier, later), (earlier.message, later.request.messages[len(earlier.request.messages) :])


def goes_on(earlier: Call, later: Call) -> bool:
    kept = earlier.prompt_ids + earlier.completion.token_ids
    return later.prompt_ids[: len(kept)] == kept and len(later.prompt_ids) > len(kept)


def sends_back(earlier: Call, later: Call) -> bool:
    """Return whether the later request has the earlier reply, by its words and tool names, where it should stand."""
    position = len(earlier.request.messages)
    if len(later.request.messages) <= position + 1:
        return False
    reply = later.request.messages[position]
    return (
        reply.role == "assistant"
        and reply.text.strip() == earlier.message.text.strip()
        and [call.name for call in reply.tool_calls] == [call.name for call in earlier.message.tool_calls]
    )


def describe(finished: RolloutResult, seconds: float) -> str:
    """Describe a session in a line, for the log of a failed test."""
    calls = finished.rollout.calls
    prompts = [len(call.prompt_ids) for call in calls]
    sampled = [len(call.completion.token_ids) for call in calls]
    parents = [call.parent for call in calls]
    return (
        f"{finished.rollout.id}: {len(calls)} calls, prompts {prompts}, sampled {sampled}, parents {parents}, "
        f"purposes {[call.purpose for call in calls]}, {finished.rollout.stop_reason}, "
        f"{dict(finished.rollout.counters)}, {dict(finished.reconstruction.counters)}, {seconds:.1f} s"
    )
