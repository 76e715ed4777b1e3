"""Rows to tensors, and the laws that they keep."""

import pytest
import torch

from polar_trl.errors import LawError
from polar_trl.grpo.batch import Row, build_batch, row_weights, split_batch
from polar_trl.grpo.importance import importance_ratio, logprob_gap
from polar_trl.types import Trajectory


def trajectory(rollout_id: str, mask: str, first_id: int = 10) -> Trajectory:
    """`mask` has a letter per token: "." context, "x" sampled."""
    trainable = tuple(letter == "x" for letter in mask)
    return Trajectory(
        rollout_id=rollout_id,
        call_indices=(0,),
        token_ids=tuple(range(first_id, first_id + len(mask))),
        trainable=trainable,
        logprobs=tuple(-0.5 if t else 0.0 for t in trainable),
        policy_versions=tuple(0 if t else -1 for t in trainable),
    )


def test_prompt_and_completion_are_padded_outwards() -> None:
    rows = [
        Row(trajectory=trajectory("a", "...xx.x"), advantage=2.0),
        Row(trajectory=trajectory("b", ".x"), advantage=-1.0),
    ]
    batch = build_batch(rows, [1.0, 0.5], num_rows=3, pad_token_id=0, device=torch.device("cpu"))
    assert batch["prompt_ids"].tolist() == [[10, 11, 12], [0, 0, 10], [0, 0, 0]]
    assert batch["prompt_mask"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 1]]
    assert batch["completion_ids"].tolist() == [[13, 14, 15, 16], [11, 0, 0, 0], [0, 0, 0, 0]]
    assert batch["completion_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert batch["tool_mask"].tolist() == [[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert batch["sampling_per_token_logps"][0].tolist() == [-0.5, -0.5, 0.0, -0.5]
    assert batch["advantages"].tolist() == [2.0, -0.5, 0.0]


def test_a_batch_of_fillers_only_trains_nothing() -> None:
    batch = build_batch([], [], num_rows=2, pad_token_id=7, device=torch.device("cpu"))
    assert batch["tool_mask"].sum() == 0
    assert batch["prompt_mask"].sum(1).tolist() == [1, 1]


def test_rows_are_never_left_out() -> None:
    rows = [Row(trajectory=trajectory("a", ".x"), advantage=1.0)] * 2
    with pytest.raises(LawError, match="2 rows do not fit a batch of 1"):
        build_batch(rows, [1.0, 1.0], num_rows=1, pad_token_id=0, device=torch.device("cpu"))


def test_weights_make_row_means_rollout_means() -> None:
    rows = [Row(trajectory=trajectory(r, m), advantage=1.0) for r, m in [("a", ".xxx"), ("a", ".x"), ("b", ".xx")]]
    assert row_weights(rows, loss_type="dapo", num_rows=4, num_rollouts=2) == [1.0, 1.0, 1.0]
    assert row_weights(rows, loss_type="grpo", num_rows=4, num_rollouts=2) == [1.5, 0.5, 2.0]
    assert row_weights(rows, loss_type="dr_grpo", num_rows=4, num_rollouts=2) == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [[2.0, 0.5, 1.0]]),
        ("token_mask", [[0.0, 0.5, 1.0]]),
        ("sequence_truncate", [[1.5]]),
        ("sequence_mask", [[1.5]]),
    ],
)
def test_importance_ratios(mode: str, expected: list[list[float]]) -> None:
    trainer = torch.tensor([[3.0, 0.5, 9.0]]).log()
    sampling = torch.ones(1, 3).log()
    mask = torch.tensor([[1, 1, 0]])
    ratio = importance_ratio(trainer, sampling, mask, mode=mode, clip_min=None, clip_max=2.0)
    assert torch.allclose(ratio, torch.tensor(expected))


def test_the_gap_counts_trained_tokens_only() -> None:
    gap = logprob_gap(torch.tensor([[0.0, -1.0, -9.0]]), torch.tensor([[-0.5, -1.25, 0.0]]), torch.tensor([[1, 1, 0]]))
    assert (gap.total.item(), gap.count.item(), gap.largest.item()) == (0.75, 2.0, 0.5)


@pytest.mark.parametrize("by_length", [True, False])
def test_parts_hold_every_token_once(by_length: bool) -> None:
    masks = ["..x", ".....xx.xx", ".x", "...xxx"]
    rows = [Row(trajectory=trajectory(m, m, first_id=100 * i), advantage=i) for i, m in enumerate(masks)]
    batch = build_batch(rows, [1.0] * 4, num_rows=4, pad_token_id=0, device=torch.device("cpu"))
    batch["num_items_in_batch"] = torch.tensor(8)
    parts = split_batch(batch, 2, by_length=by_length)
    seen = []
    for part in parts:
        assert part["num_items_in_batch"] == 8
        # no column is padding only
        assert part["prompt_mask"].any(dim=0).all()
        assert part["completion_mask"].any(dim=0).all()
        for b in range(2):
            ids = part["prompt_ids"][b][part["prompt_mask"][b] == 1].tolist()
            ids += part["completion_ids"][b][part["completion_mask"][b] == 1].tolist()
            seen.append((ids, part["advantages"][b].item(), part["tool_mask"][b].sum().item()))
    expected = [(list(r.trajectory.token_ids), r.advantage, sum(r.trajectory.trainable)) for r in rows]
    assert sorted(seen) == sorted(expected)
    if by_length:
        assert parts[0]["prompt_ids"].size(1) + parts[0]["completion_ids"].size(1) == 3
