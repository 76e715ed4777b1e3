"""The engine thread, on vLLM's real CPU build and a tiny random model."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import CHAT, HELLO, http, new_log, serve, wait_until
from tiny_vllm import build_tiny_vllm

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.colocate import set_environment
from polar_trl.engine.gate import GateStats
from polar_trl.errors import EngineError

PROMPTS = [tuple(range(10 + 7 * i, 22 + 7 * i)) for i in range(8)]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Any:
    return build_tiny_vllm(tiny_model)


@pytest.fixture()
def engine(llm: Any) -> Iterator[Any]:
    from polar_trl.engine.vllm import VllmEngine

    engine = VllmEngine(llm)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


def score(reference: Any, prompt: tuple[int, ...], completion: tuple[int, ...], temperature: float) -> Any:
    import torch

    with torch.no_grad():
        logits = reference(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def generate_all(engine: Any, params: GenerationParams, prompts: list[tuple[int, ...]] = PROMPTS) -> list[Any]:
    async def main() -> list[Any]:
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))

    return asyncio.run(main())


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_the_sampled_distribution(engine: Any, reference: Any, temperature: float) -> None:
    import torch

    for prompt, completion in zip(
        PROMPTS, generate_all(engine, GenerationParams(max_tokens=16, temperature=temperature)), strict=True
    ):
        assert len(completion.token_ids) == 16 or completion.finish_reason == "stop"
        expected = score(reference, prompt, completion.token_ids, temperature)
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


def test_greedy_tokens_are_the_reference_argmax(engine: Any, reference: Any) -> None:
    import torch

    (completion,) = generate_all(engine, GenerationParams(max_tokens=8, temperature=0.0), PROMPTS[:1])
    ids = torch.tensor([PROMPTS[0] + completion.token_ids])
    with torch.no_grad():
        best = reference(ids).logits[0, len(PROMPTS[0]) - 1 : -1].argmax(-1)
    assert tuple(best.tolist()) == completion.token_ids


def test_the_stop_token_stays_in_the_completion(engine: Any, reference: Any) -> None:
    params = GenerationParams(max_tokens=8, temperature=0.0)
    (free,) = generate_all(engine, params, PROMPTS[:1])
    stop = free.token_ids[3]
    first = free.token_ids.index(stop)
    params = GenerationParams(max_tokens=8, temperature=0.0, stop_token_ids=(stop,))
    (stopped,) = generate_all(engine, params, PROMPTS[:1])
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"


def test_cancelling_aborts_one_request_and_leaves_the_others(engine: Any) -> None:
    async def main() -> tuple[Any, list[Any]]:
        params = GenerationParams(max_tokens=200)
        long = asyncio.create_task(engine.generate(PROMPTS[0], params))
        others = [asyncio.create_task(engine.generate(p, GenerationParams(max_tokens=12))) for p in PROMPTS[1:]]
        await asyncio.sleep(0.05)
        long.cancel()
        done = await asyncio.gather(*others)
        with pytest.raises(asyncio.CancelledError):
            await long
        while engine._core.has_unfinished_requests():
            await asyncio.sleep(0.01)
        return long, done

    task, done = asyncio.run(main())
    assert task.cancelled()
    assert len(done) == 7


def test_requests_are_held_while_paused_and_the_version_grows(engine: Any) -> None:
    async def main() -> tuple[bool, Any]:
        with engine.paused(new_policy=True):
            held = asyncio.create_task(engine.generate(PROMPTS[0], GenerationParams(max_tokens=4)))
            await asyncio.sleep(0.2)
            was_held = not held.done()
        return was_held, await held

    before = engine.policy_version
    was_held, completion = asyncio.run(main())
    assert was_held
    assert completion.first_policy_version == completion.last_policy_version == before + 1


def test_the_share_of_prompts_that_was_cached(engine: Any) -> None:
    prompt = tuple(range(100, 340))
    params = GenerationParams(max_tokens=1)
    engine.take_prompt_cached()
    generate_all(engine, params, [prompt])
    assert engine.take_prompt_cached() == 0.0
    generate_all(engine, params, [prompt])
    assert 0.0 < engine.take_prompt_cached() < 1.0
    assert engine.take_prompt_cached() is None


@pytest.mark.parametrize("num_refusals", [3, 1000])
def test_a_push_waits_for_blocks_in_use_and_fails_where_they_stay(
    engine: Any, llm: Any, monkeypatch: pytest.MonkeyPatch, num_refusals: int
) -> None:
    answers = iter([False] * num_refusals)
    reset = llm.reset_prefix_cache
    monkeypatch.setattr(llm, "reset_prefix_cache", lambda: next(answers, None) is None and reset())
    before = engine.policy_version
    if num_refusals == 3:
        with engine.paused(new_policy=True):
            pass
        assert engine.policy_version == before + 1
        return
    with (
        pytest.raises(EngineError, match="vLLM keeps keys and values of the old weights"),
        engine.paused(new_policy=True),
    ):
        pass
    assert engine.policy_version == before


def test_a_call_held_at_the_gate_is_sampled_by_the_next_policy(engine: Any) -> None:
    """Through a proxy, as the trainer does it: the call in flight ends, the next one waits, and the engine is free."""
    before = engine.policy_version
    with serve(engine, params=GenerationParams(max_tokens=24)) as proxy, ThreadPoolExecutor() as threads:
        log, gate_stats = new_log(), GateStats()
        agent = http(proxy.open_session(log, gate_stats=gate_stats))
        first = threads.submit(agent.post, CHAT, json={"messages": HELLO})
        wait_until(lambda: gate_stats.first_policy_version is not None)
        proxy.hold()
        assert not engine._core.has_unfinished_requests()
        assert first.result().status_code == 200
        second = threads.submit(agent.post, CHAT, json={"messages": HELLO, "stop": "another question"})
        wait_until(lambda: gate_stats.held_s > 0.0)
        with engine.paused(new_policy=True):
            assert len(log.calls) == 1
        # a block that changes nothing, and the trainer's own requests, work beside it
        with engine.paused():
            pass
        generate_all(engine, GenerationParams(max_tokens=4), PROMPTS[:1])
        assert not second.done()
        proxy.release()
        assert second.result().status_code == 200
    versions = [(call.completion.first_policy_version, call.completion.last_policy_version) for call in log.calls]
    assert versions == [(before, before), (before + 1, before + 1)]


def test_a_prompt_that_is_too_long_fails_alone(engine: Any) -> None:
    async def main() -> Any:
        good = asyncio.create_task(engine.generate(PROMPTS[0], GenerationParams(max_tokens=4)))
        with pytest.raises(EngineError, match="refused"):
            await engine.generate(tuple(range(5, 305)), GenerationParams(max_tokens=4))
        return await good

    assert len(asyncio.run(main()).token_ids) >= 1


def test_a_request_that_cannot_be_sampled_fails_alone(engine: Any) -> None:
    async def main() -> Any:
        good = asyncio.create_task(engine.generate(PROMPTS[0], GenerationParams(max_tokens=4)))
        with pytest.raises(EngineError, match=r"refused.*max_tokens"):
            await engine.generate(PROMPTS[1], GenerationParams(max_tokens=0))
        return await good

    assert len(asyncio.run(main()).token_ids) >= 1


def test_flat_logprobs_are_the_values_that_vllm_gives_as_objects(engine: Any, llm: Any) -> None:
    """The engine's request and reading, against vLLM's own dictionaries for the same sampled ids."""
    from polar_trl.engine.vllm import build_sampling_params

    params = GenerationParams(max_tokens=16, temperature=0.0)
    completions = generate_all(engine, params)
    plain = build_sampling_params(params)
    plain.flat_logprobs = False
    with engine.paused():
        llm.reset_prefix_cache()
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], plain, use_tqdm=False)
    for completion, output in zip(completions, outputs, strict=True):
        sampled = output.outputs[0]
        assert tuple(sampled.token_ids) == completion.token_ids
        entries = [at[i].logprob for at, i in zip(sampled.logprobs, sampled.token_ids, strict=True)]
        assert [len(at) for at in sampled.logprobs] == [1] * len(entries)
        assert completion.logprobs == pytest.approx(entries, abs=1e-5)


def test_logprobs_of_other_tokens_than_the_sampled_ones_are_refused() -> None:
    from vllm.logprobs import FlatLogprobs, Logprob

    from polar_trl.engine.vllm import _take_logprobs

    flat = FlatLogprobs()
    flat.append({7: Logprob(logprob=-0.25, rank=1)})
    flat.append({9: Logprob(logprob=-1.5, rank=3)})
    assert _take_logprobs(flat, (7, 9)) == (-0.25, -1.5)
    with pytest.raises(EngineError, match="2 tokens that are not the 2 sampled"):
        _take_logprobs(flat, (7, 8))


def test_closing_fails_who_waits_and_who_comes_later(llm: Any) -> None:
    from polar_trl.engine.vllm import VllmEngine

    engine = VllmEngine(llm)

    async def main() -> None:
        waiting = asyncio.create_task(engine.generate(PROMPTS[0], GenerationParams(max_tokens=200)))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineError, match="closed"):
            await waiting
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(PROMPTS[1], GenerationParams(max_tokens=4))

    asyncio.run(main())
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_call_that_comes_while_the_engine_ends_does_not_wait_for_ever(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polar_trl.engine import vllm

    engine = vllm.VllmEngine(llm)
    build = vllm.build_sampling_params

    def close_and_build(params: GenerationParams, **options: Any) -> Any:
        engine.close()  # after `generate` has looked for a failure, and before it asks
        return build(params, **options)

    monkeypatch.setattr(vllm, "build_sampling_params", close_and_build)
    with pytest.raises(EngineError, match="the engine was closed"):
        asyncio.run(asyncio.wait_for(engine.generate(PROMPTS[0], GenerationParams(max_tokens=4)), 20))


def test_a_failing_step_reaches_every_waiter(llm: Any) -> None:
    from polar_trl.engine.vllm import VllmEngine

    engine = VllmEngine(llm)

    class BrokenCore:
        """The real core, whose next step raises."""

        def __getattr__(self, name: str) -> Any:
            return getattr(llm.llm_engine, name)

        def step(self) -> list[Any]:
            raise RuntimeError("out of memory")

    engine._core = BrokenCore()
    with pytest.raises(EngineError, match="out of memory"):
        generate_all(engine, GenerationParams(max_tokens=4))
    engine.close()
    assert not llm.llm_engine.has_unfinished_requests()


def test_the_engine_runs_without_full_graphs_of_mixed_batches(llm: Any) -> None:
    from vllm.config import CUDAGraphMode

    from polar_trl.engine.cuda_graphs import require_safe_graphs

    config = llm.llm_engine.vllm_config
    assert require_safe_graphs(config) == "NONE"
    # what is looked at is what the runner reads
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    assert runner.compilation_config is config.compilation_config
    verdicts = {}
    for mode in (*CUDAGraphMode, None):
        resolved = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
        name = None if mode is None else mode.name
        try:
            verdicts[name] = require_safe_graphs(resolved)
        except EngineError as error:
            assert "resolved cudagraph_mode to FULL)" in str(error)
            verdicts[name] = "refused"
    assert verdicts == {
        "NONE": "NONE",
        "PIECEWISE": "PIECEWISE",
        "FULL": "refused",
        "FULL_DECODE_ONLY": "FULL_DECODE_ONLY",
        "FULL_AND_PIECEWISE": "FULL_AND_PIECEWISE",
        None: "NONE",
    }


@pytest.mark.parametrize(("setting", "expected"), [("decode", "FULL_DECODE_ONLY"), ("none", "NONE")])
def test_vllm_reads_the_setting(setting: str, expected: str, tiny_model: Path) -> None:
    """The arguments as vLLM itself understands them, on a platform that has graphs."""
    set_environment(cpu=True)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from polar_trl.engine.cuda_graphs import LLM_KWARGS

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "support_static_graph_mode", lambda _: True)
        args = EngineArgs(model=str(tiny_model), max_model_len=256, dtype="float32", **LLM_KWARGS[setting])
        config = args.create_engine_config().compilation_config
    assert (config.cudagraph_mode.name, config.mode.name) == (expected, "NONE")


def test_a_trainers_engine_with_full_graphs_is_refused(tiny_model: Path) -> None:
    """However they got there: here vLLM answers with FULL to a setting that did not ask for it."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.generation import vllm_generation
    from vllm.config import CUDAGraphMode

    from polar_trl.engine.colocate import ColocatedVllm

    resolved = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "0")  # TRL sets them; the patch takes them back
            patch.delenv(name)
        built = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=resolved))
        patch.setattr(vllm_generation, "LLM", lambda **_: built)
        with pytest.raises(EngineError, match="Set engine_cuda_graphs to 'decode' or 'none'"):
            ColocatedVllm(
                AutoModelForCausalLM.from_pretrained(tiny_model),
                Accelerator(cpu=True),
                AutoTokenizer.from_pretrained(tiny_model),
                llm_kwargs={},
            )


@pytest.mark.parametrize("stop", [(), ("e",)])
def test_who_looks_at_a_request_gets_the_same_and_sees_it_grow(engine: Any, stop: tuple[str, ...]) -> None:
    params = GenerationParams(max_tokens=40, temperature=0.0, stop=stop)
    lengths: list[int] = []

    async def main() -> tuple[list[Any], list[int]]:
        so_far: list[int] = []
        whole = [engine.generate(prompt, params) for prompt in PROMPTS[1:4]]
        tasks = [asyncio.ensure_future(one) for one in (engine.generate_live(PROMPTS[0], params, so_far), *whole)]
        while not all(task.done() for task in tasks):
            lengths.append(len(so_far))
            await asyncio.sleep(0.001)
        return [task.result() for task in tasks], so_far

    completions, so_far = asyncio.run(main())
    alone = generate_all(engine, params, PROMPTS[:4])
    assert [one.token_ids for one in completions] == [one.token_ids for one in alone]
    for one, other in zip(completions, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4) and one.finish_reason == other.finish_reason
    # all but what the last step gave, in order
    assert tuple(so_far) == completions[0].token_ids[: len(so_far)] and len(so_far) >= len(alone[0].token_ids) - 1
    assert lengths == sorted(lengths) and len(set(lengths)) > 3 * (not stop)
