"""A float32 checkpoint in an engine of half precision: rounded as a run that begins from it rounds it.

vLLM's CPU build with a tiny model of random weights on bfloat16's grid, and all of them moved by 1e-4.
"""

import json
import subprocess
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import try_to_load_from_cache as find_cached
from launch import find_warm_python

from polar_trl.engine import standalone
from polar_trl.engine.rounding import round_weight
from polar_trl.engine.standalone import list_float32_files

ROUND = """
import json, logging, os, sys
from safetensors.torch import save_file
from polar_trl.engine.standalone import build_standalone_engine

if __name__ == "__main__":
    model, dtype, dithered, out = sys.argv[1:]
    # warnings of the package are what users see
    warned = []
    logging.getLogger("polar_trl").addHandler(handler := logging.Handler())
    handler.emit = lambda record: warned.append(record.getMessage())
    engine = build_standalone_engine(
        model, cpu=True, max_model_len=128, max_num_seqs=4, dtype=dtype, dithered=json.loads(dithered)
    )
    weights = engine._core.model_executor.driver_worker.model_runner.model.state_dict()
    save_file({"weight": weights["model.layers.0.mlp.down_proj.weight"].float().clone()}, out)
    engine.close()
    print(json.dumps([str(engine.dtype), warned]), flush=True)
    os._exit(0)
"""
NAME = "model.layers.0.mlp.down_proj.weight"


def test_small_changes_of_a_float32_checkpoint_arrive(smollm2: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
            parameter.copy_(parameter.to(torch.bfloat16))
    published = model.state_dict()[NAME].clone()
    for name, move in (("published", 0.0), ("tuned", 1e-4)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(move * torch.sign(torch.randn_like(parameter)))
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    tuned = model.state_dict()[NAME]

    def run(name: str, dtype: str, dithered: bool) -> tuple[list[str], torch.Tensor]:
        out = tmp_path / "weight.safetensors"
        command = [find_warm_python(), "-c", ROUND, str(tmp_path / name), dtype, json.dumps(dithered), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        used, warned = json.loads(done.stdout.splitlines()[-1])
        assert used == f"torch.{dtype}"
        return warned, load_file(out)["weight"]

    warned, dithered = run("tuned", "bfloat16", True)
    assert len(warned) == 1 and "is float32: its weights are rounded to bfloat16" in warned[0]
    assert torch.equal(dithered, round_weight(tuned.contiguous(), NAME, torch.bfloat16, seed=0, dithered=True).float())
    unwarned, nearest = run("tuned", "bfloat16", False)
    assert unwarned == [] and torch.equal(nearest, tuned.to(torch.bfloat16).float())
    move = tuned - published

    def share(rounded: torch.Tensor) -> float:
        return float(((rounded - published) * move).sum() / (move * move).sum())

    assert share(nearest) < 0.8 and 0.9 < share(dithered) < 1.1
    for name, dtype, expected in (("published", "bfloat16", published), ("tuned", "float32", tuned)):
        warned, weight = run(name, dtype, True)
        assert warned == [] and torch.equal(weight, expected)


def test_only_a_checkpoint_that_is_float32_as_a_whole_is_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import save_file

    def write(folder: Path, name: str, **dtypes: torch.dtype) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({key: torch.ones(2, dtype=dtype) for key, dtype in dtypes.items()}, folder / name)
        return folder / name

    one = write(tmp_path / "one", "model.safetensors", a=torch.float32)
    write(tmp_path / "one", "adapter_model.safetensors", a=torch.float32)
    assert list_float32_files(str(tmp_path / "one")) == [one]
    # weights that stay in float32 in a checkpoint of half precision, scales of a quantized one
    for number, other in enumerate((torch.bfloat16, torch.float16, torch.int8)):
        write(tmp_path / str(number), "model.safetensors", a=other, scale=torch.float32)
        assert list_float32_files(str(tmp_path / str(number))) == []
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin").touch()
    assert list_float32_files(str(tmp_path / "old")) == []

    # of shards those that the index names, and a model of the hub as vLLM downloads it: without a README
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    shards = [write(snapshot, f"model-0000{n}-of-00002.safetensors", **{f"w{n}": torch.float32}) for n in (1, 2)]
    write(snapshot, "model-00003-of-00003.safetensors", w1=torch.bfloat16)
    weights = {f"w{n}": shard.name for n, shard in enumerate(shards, start=1)}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert list_float32_files(str(snapshot)) == shards
    (tmp_path / "hub" / "models--org--name" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--name" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(standalone, "try_to_load_from_cache", partial(find_cached, cache_dir=tmp_path / "hub"))
    assert list_float32_files("org/name") == shards
    assert list_float32_files("org/other") == []
