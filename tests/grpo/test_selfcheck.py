"""The start-up check: an engine that computes something else stops the run."""

from pathlib import Path
from typing import Any

import pytest

from polar_trl.engine.scripted import ScriptedEngine
from polar_trl.errors import ConfigError, EngineError
from polar_trl.grpo.logs.summary import build_summary, print_summary, write_summary
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


def test_a_summary_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log: list[dict[str, Any]] = [
        {"reward": r, "polar/sampled_tokens": 10, "polar/trained_tokens": 9, "polar/trajectories_per_rollout": 1.5}
        for r in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0)
    ]
    # a step in which nothing had a reward still cost its tokens
    log.insert(3, {"reward": None, "polar/sampled_tokens": 10, "polar/trained_tokens": 0})
    gap = "sampling/sampling_logp_difference"
    log[0] |= {f"{gap}/mean": 0.02, f"{gap}/p99": 0.1, f"{gap}/max": 0.7}
    log[1] |= {f"{gap}/mean": 0.04, f"{gap}/p99": 0.3, f"{gap}/max": 0.5}
    log.append({"train_runtime": 3.0})
    summary = build_summary(log, seconds=12.34)
    assert (summary["steps"], summary["seconds"]) == (9, 12.3)
    assert summary["reward_first_quarter"] == pytest.approx(0.1)
    assert summary["reward_last_quarter"] == pytest.approx(1.0)
    assert (summary["sampled_tokens"], summary["trained_tokens"]) == (90, 72)
    assert summary["trajectories_per_rollout"] == 1.5
    gaps = [summary[f"logprob_gap_{name}"] for name in ("mean", "p99", "max")]
    assert gaps == pytest.approx([0.03, 0.2, 0.7])
    print_summary(summary)
    assert "│ overhead_share           │ -    │" in capsys.readouterr().out  # no step had it
    write_summary(tmp_path, summary)
    assert (tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="logged no reward"):
        build_summary([{"train_runtime": 3.0}], seconds=1.0)
