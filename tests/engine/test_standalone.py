"""A float32 checkpoint in an engine of half precision: rounded as a run that begins from it rounds it.

vLLM's CPU build with a tiny model of random weights on bfloat16's grid, and all of them moved by 1e-4.
"""

import json
import subprocess
from pathlib import Path

from launch import find_warm_python

from polar_trl.engine.rounding import round_weight

ROUND = """
import json, os, sys
import torch
from safetensors.torch import save_file
from polar_trl.engine.standalone import build_standalone_engine, dither_weights

if __name__ == "__main__":
    model, dtype, out = sys.argv[1:]
    engine = build_standalone_engine(model, cpu=True, max_model_len=128, max_num_seqs=4, dtype=dtype)
    weights = engine._core.model_executor.driver_worker.model_runner.model.state_dict()
    name = "model.layers.0.mlp.down_proj.weight"
    before = weights[name].float().clone()
    count = dither_weights(engine, model, seed=3)
    save_file({"before": before, "after": weights[name].float().clone()}, out)
    engine.close()
    print(json.dumps([count, str(engine.dtype)]), flush=True)
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

    def run(name: str, dtype: str) -> tuple[list[object], dict[str, torch.Tensor]]:
        out = tmp_path / f"{name}-{dtype}.safetensors"
        command = [find_warm_python(), "-c", ROUND, str(tmp_path / name), dtype, str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), load_file(out)

    found, weights = run("tuned", "bfloat16")
    assert found == [len(list(model.parameters())), "torch.bfloat16"]
    expected = round_weight(tuned.contiguous(), NAME, torch.bfloat16, seed=3, dithered=True)
    assert torch.equal(weights["before"], tuned.to(torch.bfloat16).float())
    assert torch.equal(weights["after"], expected.float())
    move = tuned - published

    def share(rounded: torch.Tensor) -> float:
        return float(((rounded - published) * move).sum() / (move * move).sum())

    assert share(weights["before"]) < 0.8 and 0.9 < share(weights["after"]) < 1.1
    assert run("published", "bfloat16")[0] == [0, "torch.bfloat16"]
    assert run("tuned", "float32")[0] == [0, "torch.float32"]
