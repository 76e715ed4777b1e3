"""The scripted engine keeps the engine's contract."""

import asyncio

import pytest

from polar_trl.engine.base import GenerationParams
from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import EngineBusyError, EngineError
from polar_trl.types import Completion

PARAMS = GenerationParams(max_tokens=4)


def generate(
    engine: ScriptedEngine, prompt_ids: tuple[int, ...] = (1, 2), params: GenerationParams = PARAMS
) -> Completion:
    return asyncio.run(engine.generate(prompt_ids, params))


def test_replies_come_in_order_until_the_script_is_used_up() -> None:
    engine = ScriptedEngine([(5, 6), [7]], logprob=-1.5, policy_version=3)
    assert generate(engine) == Completion(
        token_ids=(5, 6),
        logprobs=(-1.5, -1.5),
        finish_reason="stop",
        first_policy_version=3,
        last_policy_version=3,
    )
    assert generate(engine).token_ids == (7,)
    with pytest.raises(EngineError, match="no reply left for request 3"):
        generate(engine)


def test_a_reply_may_be_an_error() -> None:
    busy = EngineBusyError("later", retry_after_s=1.0)
    engine = ScriptedEngine([busy, [7]])
    with pytest.raises(EngineBusyError) as caught:
        generate(engine)
    assert caught.value is busy
    assert generate(engine).token_ids == (7,)


def test_a_reply_is_cut_at_max_tokens() -> None:
    completion = generate(ScriptedEngine([range(10)]))
    assert completion.token_ids == (0, 1, 2, 3)
    assert completion.finish_reason == "length"


def test_a_completion_is_given_as_it_is_unless_it_is_too_long() -> None:
    short = Completion(token_ids=(1,), logprobs=(-0.1,), finish_reason="length", first_policy_version=8)
    long = Completion(token_ids=(1, 2, 3, 4, 5), logprobs=(-1.0, -2.0, -3.0, -4.0, -5.0), finish_reason="stop")
    engine = ScriptedEngine([short, long])
    assert generate(engine) == short
    cut = generate(engine)
    assert (cut.logprobs, cut.finish_reason) == ((-1.0, -2.0, -3.0, -4.0), "length")


def test_a_function_sees_the_prompt() -> None:
    engine = ScriptedEngine(lambda prompt_ids: prompt_ids[::-1])
    assert generate(engine, (1, 2, 3)).token_ids == (3, 2, 1)
    assert engine.params == [PARAMS]


def test_a_request_that_does_not_fit_is_refused() -> None:
    with pytest.raises(EngineError, match="2 prompt tokens and 4 to sample exceed max_model_len 5"):
        generate(ScriptedEngine([(1,)], max_model_len=5))


def test_a_version_that_changes_meanwhile_is_told() -> None:
    async def update_while_sampling() -> Completion:
        engine = ScriptedEngine([(1,)], delay_s=0.01)
        task = asyncio.create_task(engine.generate((1,), PARAMS))
        await asyncio.sleep(0)
        engine.policy_version = 1
        return await task

    completion = asyncio.run(update_while_sampling())
    assert (completion.first_policy_version, completion.last_policy_version) == (0, 1)


def test_a_cancelled_request_counts_as_aborted() -> None:
    engine = ScriptedEngine([(1,)], delay_s=60)

    async def cancel() -> None:
        task = asyncio.create_task(engine.generate((1,), PARAMS))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(cancel())
    assert engine.num_aborted == 1
