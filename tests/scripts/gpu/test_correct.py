"""Test the judgement of scripts/gpu/correct.py: right engines pass, wrong ones do not, ties are told from errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

PROMPTS = [[10, 11, 12], [200, 300, 400, 500]]


@pytest.fixture(scope="module")
def batch() -> Any:
    from correct_sampling import Batch, Request

    requests = [Request(prompt_ids=prompt, max_tokens=12) for prompt in PROMPTS]
    return Batch(name="greedy", temperature=0.0, requests=requests)


@pytest.fixture(scope="module")
def judge(tiny_model: Path, batch: Any) -> Any:
    import torch
    from correct_scoring import Judge
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    return Judge(str(tiny_model), tokenizer, [batch], torch.device("cpu"), max_text=12)


@pytest.fixture()
def samples(judge: Any, batch: Any) -> list[Any]:
    """Answers of a right engine in float32."""
    from correct_sampling import Sample

    answers = []
    for request, text in zip(batch.requests, judge.texts["float32"]["greedy"], strict=True):
        logprobs, _ = judge.references["float32"].score(request.prompt_ids, text)
        answers.append(Sample(token_ids=text, logprobs=logprobs.tolist(), started_s=0.0, ended_s=1.0))
    return answers


def test_the_reference_itself_is_right(judge: Any, batch: Any, samples: list[Any]) -> None:
    row = judge.judge(batch, samples, "float32")
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    assert (row["verdict"], row["tokens"], row["ties"]) == ("right", num_tokens, "0")
    assert row["same"].startswith(f"{num_tokens} / ")
    assert row["figures"]["float32"] == {"mean": 0.0, "p99": 0.0, "max": 0.0}
    # bfloat16 computes something else, by more than float32's tolerance and less than its own
    assert 1e-3 < row["figures"]["bfloat16"]["mean"] < 0.3


def test_a_wrong_logprob_is_wrong(judge: Any, batch: Any, samples: list[Any]) -> None:
    shifted = [replace(sample, logprobs=[value - 0.01 for value in sample.logprobs]) for sample in samples]
    row = judge.judge(batch, shifted, "float32")
    assert (row["verdict"], row["figures"]["float32"]["mean"]) == ("WRONG", pytest.approx(0.01, abs=1e-5))
    assert judge.judge(batch, shifted, "bfloat16")["verdict"] == "right"


def test_a_token_that_is_no_tie_is_wrong_even_with_its_own_logprob(judge: Any, batch: Any, samples: list[Any]) -> None:
    tokens = samples[1].token_ids
    other = [*tokens[:5], (tokens[5] + 1) % 1000, *tokens[6:]]
    logprobs, lead = judge.references["float32"].score(batch.requests[1].prompt_ids, other)
    row = judge.judge(
        batch, [samples[0], replace(samples[1], token_ids=other, logprobs=logprobs.tolist())], "bfloat16"
    )
    assert float(lead[5]) > 0.3
    assert row["figures"]["float32"]["mean"] == pytest.approx(0.0, abs=1e-6)
    assert row["verdict"] == "WRONG"
    assert row["same"].split(" / ")[0] == str(len(samples[0].token_ids) + 5)
    assert f"({float(lead[5]):.2g}, " in row["ties"]


def test_logprobs_that_are_no_numbers_are_wrong(judge: Any, batch: Any, samples: list[Any]) -> None:
    broken = [replace(sample, logprobs=[float("nan")] * len(sample.token_ids)) for sample in samples]
    assert judge.judge(batch, broken, "bfloat16")["verdict"] == "WRONG"


def test_the_trainers_pass_scores_what_transformers_scores(judge: Any, batch: Any, tiny_model: Path) -> None:
    import torch
    from correct_sampling import Sample
    from correct_scoring import Fidelity

    warm = replace(batch, temperature=0.7)
    answers = []
    for request in batch.requests:
        tokens = [30, 40, 50]
        logprobs, _ = judge.references["float32"].score(request.prompt_ids, tokens, 0.7)
        answers.append(Sample(token_ids=tokens, logprobs=logprobs.tolist(), started_s=0.0, ended_s=1.0))
    row = Fidelity(str(tiny_model), judge.references["float32"], torch.device("cpu")).measure(warm, answers)
    assert row["tokens"] == 6
    assert "failed" not in row
    assert row["figures"]["trainer_float32"]["max"] < 1e-4
    assert 1e-4 < row["figures"]["trainer_bfloat16"]["mean"] < 0.3
    # at another temperature the same logprobs are wrong
    assert (
        Fidelity(str(tiny_model), judge.references["float32"], torch.device("cpu")).measure(
            replace(warm, temperature=1.0), answers
        )["figures"]["trainer_float32"]["mean"]
        > 0.01
    )


def test_figures_of_gaps() -> None:
    import torch
    from correct_scoring import count_equal, summarize_gap

    gap = torch.arange(1, 201, dtype=torch.double)
    assert summarize_gap(-gap) == {"mean": 100.5, "p99": 198.0, "max": 200.0}
    assert [count_equal([1, 2, 3], other) for other in ([1, 2, 3], [1, 5, 3], [1, 2], [])] == [3, 1, 2, 0]
