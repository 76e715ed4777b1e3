"""The start-up check: an engine that computes something else stops the run."""

from pathlib import Path
from typing import Any

import pytest

from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import EngineError
from polar_trl.grpo.selfcheck import NUM_TOKENS, check_engine
from polar_trl.types import Completion

PROMPTS = [[10, 11, 12], [200, 300, 400, 500]]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


def greedy(model: Any, prompt: tuple[int, ...], *, off_by: float = 0.0) -> Completion:
    """Answer as a right engine does, the logprobs shifted by `off_by` nats."""
    import torch

    ids, logprobs = list(prompt), []
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(scores.argmax()))
        logprobs.append(float(scores.max()) - off_by)
    return Completion(token_ids=tuple(ids[len(prompt) :]), logprobs=tuple(logprobs), finish_reason="length")


def check(model: Any, engine: ScriptedEngine, *dtypes: Any) -> float:
    import torch

    def score(prompt: list[int], token_ids: list[int]) -> Any:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0]

    return check_engine(engine, score, PROMPTS, temperature=1.0, dtypes=(torch.float32, *dtypes))


def test_the_right_engine_passes(model: Any) -> None:
    engine = ScriptedEngine(lambda prompt: greedy(model, prompt))
    assert check(model, engine) < 1e-4


def test_a_small_shift_is_noticed_in_float32(model: Any) -> None:
    engine = ScriptedEngine(lambda prompt: greedy(model, prompt, off_by=0.01))
    with pytest.raises(EngineError, match=r"mean gap 0\.01 nats .* Nothing was trained"):
        check(model, engine)


def test_an_engine_in_bfloat16_may_be_as_coarse_as_that(model: Any) -> None:
    import torch

    engine = ScriptedEngine(lambda prompt: greedy(model, prompt, off_by=0.03))
    assert check(model, engine, torch.bfloat16) == pytest.approx(0.03, abs=1e-3)
    engine = ScriptedEngine(lambda prompt: greedy(model, prompt, off_by=0.5))
    with pytest.raises(EngineError, match=r"at most 0\.3 is expected in torch\.bfloat16"):
        check(model, engine, torch.bfloat16)


def test_logprobs_that_are_no_numbers_are_noticed(model: Any) -> None:
    engine = ScriptedEngine(lambda prompt: greedy(model, prompt, off_by=float("nan")))
    with pytest.raises(EngineError, match="does not compute what the trainer computes"):
        check(model, engine)
