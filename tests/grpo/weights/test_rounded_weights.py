"""Rounded weights in whole runs: what computes is in the engine and on disk, masters go on, and ranks agree."""

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from launch import ACCELERATE, WORKERS, build_launcher, find_warm_python
from safetensors.torch import load_file
from tiny_qwen import build_tiny_qwen3

from polar_trl.errors import ConfigError
from polar_trl.grpo.weights.policy_weights import PolicyWeights
from polar_trl.grpo.weights.rounded_weights import RoundedWeights

SETTINGS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-5, "logging_steps": 1}


def train(model: Path, out: Path, launcher: list[str], *, resume: Path | None = None, **settings: Any) -> list[Any]:
    """Train in processes of their own; return the results of each rank."""
    out.mkdir(parents=True, exist_ok=True)
    arguments = [str(model), str(out), str(resume or "none"), json.dumps({**SETTINGS, **settings})]
    done = subprocess.run(
        [*launcher, str(WORKERS / "rounding_worker.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return [torch.load(path, weights_only=True) for path in sorted(out.glob("rank*.pt"))]


def build_fsdp2_launcher(folder: Path) -> list[str]:
    settings = yaml.safe_load((ACCELERATE / "fsdp2.yaml").read_text()) | {"num_processes": 2, "mixed_precision": "no"}
    settings.pop("gpu_ids", None)
    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump(settings))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    python = find_warm_python()
    launch = [python, "-m", "accelerate.commands.launch", "--config_file", str(file), "--no_python"]
    return [*launch, "--main_process_port", str(port), python]


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(smollm2, tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of one process, and its folder."""
    out = tmp_path_factory.mktemp("alone")
    (result,) = train(model, out, build_launcher(1, warm=True))
    return out, result


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return set(ours) == set(theirs) and all(torch.equal(ours[name].float(), theirs[name].float()) for name in ours)


def test_the_engine_and_the_checkpoint_hold_what_computes(alone: tuple[Path, dict[str, Any]]) -> None:
    out, result = alone
    assert {weight.dtype for weight in result["engine"].values()} == {torch.bfloat16}
    assert equal(result["engine"], result["computing"])
    assert equal(load_file(out / "checkpoint-4" / "model.safetensors"), result["computing"])
    assert not equal(result["masters"], result["computing"])


def test_a_resumed_run_ends_bit_for_bit_as_one_that_was_not_stopped(
    model: Path, alone: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, result = alone
    (resumed,) = train(model, tmp_path, build_launcher(1, warm=True), resume=out / "checkpoint-2")
    for key in ("computing", "masters", "engine"):
        assert equal(resumed[key], result[key]), key
    (anew,) = train(model, tmp_path / "other", build_launcher(1, warm=True), seed=43)
    assert not equal(anew["masters"], result["masters"])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_have_one_ranks_weights(
    model: Path, alone: tuple[Path, dict[str, Any]], tmp_path: Path, kind: str
) -> None:
    launcher = build_launcher(2, warm=True) if kind == "ddp" else build_fsdp2_launcher(tmp_path)
    first, second = train(model, tmp_path, launcher, per_device_train_batch_size=2)
    assert first["sharded"] == second["sharded"] == (kind == "fsdp2")
    for key in ("computing", "masters", "engine"):
        assert equal(first[key], second[key]), key
    assert equal(first["engine"], first["computing"])
    _, result = alone
    # the sum of two ranks' gradients is another float32 than one rank's: a master may differ in its last bits, and
    # one in thousands of those is then rounded to the other side
    for name, master in result["masters"].items():
        assert (first["masters"][name] - master).abs().max() < 1e-6, name
    flipped = sum(int((first["computing"][name] != weight).sum()) for name, weight in result["computing"].items())
    assert flipped < 1e-3 * sum(weight.numel() for weight in result["computing"].values())


def test_the_update_ratio_shows_what_rounding_to_nearest_loses(model: Path, tmp_path: Path) -> None:
    ratios = {}
    for rounding in ("dithered", "nearest"):
        (result,) = train(
            model,
            tmp_path / rounding,
            build_launcher(1, warm=True),
            weight_rounding=rounding,
            learning_rate=1e-7,
            max_steps=3,
        )
        ratios[rounding] = [line["polar/update_ratio"] for line in result["log"] if "polar/update_ratio" in line]
        assert len(ratios[rounding]) == 2  # of the pushes before steps 2 and 3
    assert all(0.8 < ratio < 1.2 for ratio in ratios["dithered"])
    assert all(ratio < 0.3 for ratio in ratios["nearest"])


# The module by itself.


def build_layer() -> torch.nn.Linear:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.02).bfloat16())
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_published_weights_stay_and_the_optimizer_sees_masters(dtype: torch.dtype) -> None:
    layer, plain = build_layer(), build_layer()
    published = layer.weight.detach().clone()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0) for model in (layer, plain)]
    rounded = RoundedWeights(layer.named_parameters(), dtype=dtype, seed=1, dithered=True)
    rounded.follow(optimizers[0])
    assert torch.equal(layer.weight, published)
    index = torch.arange(layer.weight.numel())
    begin = rounded.read_master("weight", index).view(64, 64)
    for step in range(3):
        for model, optimizer in zip((layer, plain), optimizers, strict=True):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    master = rounded.read_master("weight", index).view(64, 64)
    # every step of float32 arrived in the master, and what computes is its neighbour on the grid
    torch.testing.assert_close(master - begin, plain.weight.detach() - published, atol=1e-8, rtol=1e-4)
    spacing = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    normal = master.abs() > 2.0**-14  # below, float16 has other spacings, and weights are left alone
    assert (layer.weight.to(dtype).float() == layer.weight)[normal].all()
    assert ((layer.weight - master).abs() <= spacing * master.abs())[normal].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    layer = build_layer()
    rounded = RoundedWeights(layer.named_parameters(), dtype=dtype, seed=1, dithered=True)
    rounded.restore_masters()
    bad = torch.tensor([0x7FFFFFFF, 0x7FC00000, -0x400000, 0x7F800000], dtype=torch.int32)  # NaN of GPU and CPU, inf
    layer.weight.data.view(-1)[:4].view(torch.int32).copy_(bad)
    rounded.round()
    assert not torch.isfinite(layer.weight.view(-1)[:4]).any()
    assert torch.isfinite(layer.weight.view(-1)[4:]).all()


def test_weights_that_hold_no_master_are_refused() -> None:
    layer = build_layer().bfloat16()
    with pytest.raises(ConfigError, match=r"the trained weight weight is bfloat16, in which .* round to nothing"):
        RoundedWeights(layer.named_parameters(), dtype=torch.bfloat16, seed=1, dithered=True)


def test_the_state_of_another_model_is_refused() -> None:
    rounded = RoundedWeights(build_layer().named_parameters(), dtype=torch.bfloat16, seed=1, dithered=True)
    with pytest.raises(ConfigError, match="those of other parameters"):
        rounded.load_state_dict({"weight": torch.zeros(4, dtype=torch.int16)})


def test_a_run_in_float32_does_not_go_on_from_rounded_weights() -> None:
    weights = PolicyWeights(torch.float32, seed=1, dithered=True, is_deepspeed=False)
    weights.resume({"weight": torch.zeros(4096, dtype=torch.int16)})
    with pytest.raises(ConfigError, match="rounded for half precision, and this run computes in float32"):
        weights.on_train_begin(None, None, None, model=build_layer(), optimizer=None)


def test_training_that_is_begun_again_goes_on_with_its_masters() -> None:
    layer = build_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    weights = PolicyWeights(torch.bfloat16, seed=1, dithered=True, is_deepspeed=False)
    index = torch.arange(layer.weight.numel())
    masters = []
    for _ in range(2):
        weights.on_train_begin(None, None, None, model=layer, optimizer=optimizer)
        assert weights.rounded is not None
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, 1e-6)
        masters.append(weights.rounded.read_master("weight", index))
        optimizer.step()
    torch.testing.assert_close(masters[0] - masters[1], torch.full_like(masters[0], 1e-6), atol=1e-8, rtol=0.0)
