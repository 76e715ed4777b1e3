"""Offsets follow from seed, name and place; rounded weights move, in expectation, as the weights do."""

import pytest
import torch

from polar_trl.engine.rounding import choose_compute_dtype, draw_offsets, round_weight
from polar_trl.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "spacing"), [(torch.bfloat16, 1 << 16), (torch.float16, 1 << 13)])
def test_offsets_are_uniform_over_one_spacing(dtype: torch.dtype, spacing: int) -> None:
    offsets = draw_offsets(1, "layer.weight", 0, 1 << 20, dtype=dtype, device=CPU)
    counts = torch.histc(offsets.double(), bins=16, min=-spacing / 2, max=spacing / 2)
    assert counts.sum() == 1 << 20
    assert ((counts / (1 << 16) - 1).abs() < 0.02).all()
    for other in (draw_offsets(1, "other", 0, 1 << 20, dtype=dtype, device=CPU), offsets.roll(1), offsets.roll(576)):
        assert abs(torch.corrcoef(torch.stack([offsets.double(), other.double()]))[0, 1]) < 0.005


def test_a_shard_has_the_offsets_of_its_place_in_the_whole() -> None:
    whole = draw_offsets(7, "w", 0, 10_000, dtype=torch.bfloat16, device=CPU)
    assert torch.equal(draw_offsets(7, "w", 6_000, 500, dtype=torch.bfloat16, device=CPU), whole[6_000:6_500])
    assert not torch.equal(draw_offsets(8, "w", 0, 10_000, dtype=torch.bfloat16, device=CPU), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("move", [1e-6, 1e-5, -3e-6])
def test_weights_on_the_grid_stay_and_moves_arrive(dtype: torch.dtype, move: float) -> None:
    weight = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.05).to(dtype).float()
    before = round_weight(weight, "w", dtype, seed=1, dithered=True)
    assert torch.equal(before.float(), weight)
    moved = weight + move
    after = round_weight(moved, "w", dtype, seed=1, dithered=True).float()
    assert (after - weight).sum() / (moved - weight).sum() == pytest.approx(1, abs=0.05)
    nearest = round_weight(moved, "w", dtype, seed=1, dithered=False).float()
    assert torch.equal(nearest, moved.to(dtype).float())
    if dtype == torch.bfloat16:
        assert (nearest - weight).sum() / (moved - weight).sum() < 0.5


def test_zero_and_the_ends_of_the_range_are_kept() -> None:
    odd = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-38, 65504.0, -1e38]).bfloat16().float()
    for dtype in (torch.bfloat16, torch.float32):
        rounded = round_weight(odd, "w", dtype, seed=1, dithered=True)
        assert torch.isfinite(rounded).all()
        assert (rounded == odd.to(dtype)).all()


def test_two_half_precisions_are_refused_together() -> None:
    bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
    assert choose_compute_dtype(float32, float32) == float32
    for half in (bfloat16, float16):
        assert choose_compute_dtype(half, half) == half
        assert choose_compute_dtype(half, float32) == choose_compute_dtype(float32, half) == half
    with pytest.raises(ConfigError, match="computes in bfloat16 and the engine in float16"):
        choose_compute_dtype(bfloat16, float16)
