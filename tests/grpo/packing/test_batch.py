"""Rows to tensors, and the laws that they keep."""

import pytest
import torch

from polar_trl.grpo.packing.batch import build_micro_batch, to_rows
from polar_trl.grpo.rows import Row, build_row, rollout_tokens, token_shares
from polar_trl.types import Trajectory

CPU = torch.device("cpu")


def row(rollout_id: str, mask: str, advantage: float = 1.0, first_id: int = 10) -> Row:
    """`mask` has a letter per token: "." context, "x" sampled."""
    trainable = tuple(letter == "x" for letter in mask)
    trajectory = Trajectory(
        rollout_id=rollout_id,
        call_indices=(0,),
        token_ids=tuple(range(first_id, first_id + len(mask))),
        trainable=trainable,
        logprobs=tuple(-0.5 if t else 0.0 for t in trainable),
        policy_versions=tuple(0 if t else -1 for t in trainable),
    )
    return build_row(trajectory, advantage)


def test_the_loss_sees_trainable_tokens_only() -> None:
    rows = [row("a", "...xx.x", 2.0), row("b", ".x", -1.0, first_id=50)]
    batch = build_micro_batch(rows, [0.25, 0.5], [3, 4], kind="packed", device=CPU)
    assert batch["completion_ids"].tolist() == [[13, 14, 16], [51, 0, 0]]
    assert batch["completion_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["sampling_per_token_logps"].tolist() == [[-0.5] * 3, [-0.5, 0.0, 0.0]]
    assert batch["advantages"].tolist() == [2.0, -1.0]
    assert batch["shares"].tolist() == [0.25, 0.5]
    assert batch["rollout_tokens"].tolist() == [3, 4]
    packed = batch["packed"]
    assert packed.input_ids.tolist() == [[*range(10, 17), 50, 51]]
    assert packed.position_ids.tolist() == [[*range(7), 0, 1]]
    # a token is scored where the one before it is
    assert packed.scored_positions.tolist() == [2, 3, 5, 7]
    assert packed.labels.tolist() == [[13, 14, 16, 51]]


@pytest.mark.parametrize("kind", ["packed", "tree"])
def test_scored_values_find_their_rows(kind: str) -> None:
    rows = [row("a", "..xxx"), row("b", "..x"), row("c", ".xx.x", first_id=90)]
    batch = build_micro_batch(rows, [1.0] * 3, [1] * 3, kind=kind, device=CPU)  # type: ignore[arg-type]
    values = batch["packed"].labels[0].double().requires_grad_()
    per_row = to_rows(values, batch)
    assert (per_row == batch["completion_ids"]).all()
    per_row.sum().backward()
    assert values.grad is not None and (values.grad == 1).all()


def test_a_shared_prefix_is_forwarded_once() -> None:
    rows = [row("a", "....xx"), row("b", "....xxx")]
    counts = [
        build_micro_batch(rows, [1.0] * 2, [1] * 2, kind=kind, device=CPU)["packed"].input_ids.shape[1]
        for kind in ("packed", "tree")
    ]
    assert counts == [13, 7]


def test_a_pass_without_rows_trains_nothing() -> None:
    batch = build_micro_batch([], [], [], kind="tree", device=CPU)
    assert batch["completion_mask"].tolist() == [[0]]
    assert batch["shares"].tolist() == [0.0]
    assert len(batch["packed"].scored_positions) == 1
    assert to_rows(torch.ones(1), batch).shape == (1, 1)


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("dapo", [1 / 6] * 3),
        ("grpo", [1 / 4 / 2, 1 / 4 / 2, 1 / 2 / 2]),
        ("luspo", [1 / 2] * 3),
        ("dr_grpo", [1 / 2 / 10] * 3),
    ],
)
def test_shares_are_those_of_rollouts(loss_type: str, expected: list[float]) -> None:
    rows = [row(r, m) for r, m in [("a", ".xxx"), ("a", ".x"), ("b", ".xx")]]
    assert token_shares(rows, loss_type=loss_type, max_completion_length=10) == pytest.approx(expected)
    assert token_shares([], loss_type=loss_type, max_completion_length=10) == []
    assert rollout_tokens(rows) == [4, 4, 2]
