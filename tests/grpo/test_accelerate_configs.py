"""Test the accelerate files: two CPU processes train the same numbers under each, engines get the weights.

Each file is used as it is but for the number of processes and the precision.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import ACCELERATE, launch_ranks
from tiny_qwen import build_tiny_qwen3

from polar_trl.tools.memory_plan.plan import read_accelerate


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(smollm2, tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture(scope="module")
def ddp(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first, second = launch_ranks("ddp_8gpu", tmp_path_factory.mktemp("ddp"), "rows", str(model))
    assert torch.equal(first["weights"], second["weights"])
    assert first["kept"] == len(first["weights"])
    check_faulty_steps(first)
    return first


@pytest.mark.parametrize(
    ("name", "kind", "share"),
    [("fsdp2", "FSDP", 0.5), ("deepspeed_zero2", "DEEPSPEED", 1.0), ("deepspeed_zero3", "DEEPSPEED", 0.02)],
)
def test_sharded_training_gives_the_numbers_of_ddp(
    ddp: dict[str, Any], model: Path, tmp_path: Path, name: str, kind: str, share: float
) -> None:
    first, second = launch_ranks(name, tmp_path, "rows", str(model))
    # the setting took effect: without it, the numbers would be those of DDP too
    assert first["distributed_type"] == second["distributed_type"] == kind
    # ZeRO-3 keeps a parameter's share elsewhere: only what is too small to be cut is left in the model
    assert first["kept"] <= share * len(ddp["weights"]) and second["kept"] <= share * len(ddp["weights"])
    assert first["passes"] == ddp["passes"] and ddp["passes"][0] == 2  # accumulated over several backward passes
    assert len(first["losses"]) == 4
    assert first["losses"] == pytest.approx(ddp["losses"], rel=1e-5, nan_ok=True)
    for step in (0, 3):  # of the other two, one backend says infinite and another one NaN
        assert first["norms"][step] == pytest.approx(ddp["norms"][step], rel=1e-5)
    assert torch.equal(first["weights"], second["weights"])
    moved = (ddp["weights"] - first["before"]).norm()
    assert moved > 0.1
    assert (first["weights"] - ddp["weights"]).norm() < 1e-4 * moved
    for rank in (first, second):
        check_faulty_steps(rank)


def check_faulty_steps(rank: dict[str, Any]) -> None:
    """Neither a loss that is not finite, in the second step, nor no rows, in the third, move a shard or the rate."""
    made, faulty, empty, last = rank["weights_of_steps"]
    assert torch.isfinite(last).all() and not torch.equal(made, rank["before"])
    assert torch.equal(faulty, made) and torch.equal(empty, made)
    assert not torch.equal(last, made)
    assert rank["skipped"] == [0, 1, 0, 0]
    assert len(set(rank["rates"])) == 2


@pytest.mark.parametrize("name", ["deepspeed_zero2", "deepspeed_zero3"])
def test_deepspeeds_own_masters_are_dithered(model: Path, tmp_path: Path, name: str) -> None:
    # published weights are values of bfloat16; this model's are not, before DeepSpeed lowers them
    first, second = launch_ranks(name, tmp_path, "masters", str(model), precision="bf16")
    for result in (first, second):
        published = result["before"].bfloat16().float()
        before, after = result["masters"]
        assert torch.equal(before.bfloat16().float(), published)
        moved = (after - before).abs().sum()
        assert 0.9 < (result["weights"].float() - published).abs().sum() / moved < 1.1
    assert torch.equal(first["weights"], second["weights"])


@pytest.mark.parametrize("adapter", ["whole", "lora"])
def test_engines_get_the_weights_of_a_sharded_trainer(model: Path, tmp_path: Path, adapter: str) -> None:
    for result in launch_ranks("fsdp2", tmp_path, "agents", str(model), adapter):
        assert result["distributed_type"] == "FSDP"
        assert result["policy_version"] == 2
        assert result["change"] > 1e-4  # what the step did to the weights that were pushed
        assert result["gap"] < 1e-4  # float32


@pytest.mark.parametrize("path", sorted(ACCELERATE.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_says_when_to_use_it_and_can_be_planned(path: Path) -> None:
    assert path.read_text().startswith("# ")
    sharding, processes, precision = read_accelerate(path)
    assert sharding == {"fsdp2": "fsdp2", "deepspeed_zero2": "zero2", "deepspeed_zero3": "zero3"}.get(path.stem)
    assert processes == (1 if path.stem == "one_gpu" else 8)
    assert precision == "bf16"
