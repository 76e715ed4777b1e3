"""A float32 checkpoint in an engine of half precision: rounded as a run that begins from it rounds it.

vLLM's CPU build with a tiny model of random weights on bfloat16's grid, and all of them moved by 1e-4.
"""

import json
import subprocess
from pathlib import Path

from launch import find_warm_python

from polar_trl.engine.rounding import round_weight

ROUND = """
import json, logging, os, sys
from safetensors.torch import save_file
from polar_trl.engine.standalone import build_standalone_engine

if __name__ == "__main__":
    model, dtype, seed, out = sys.argv[1:]
    # warnings of the package are what users see
    warned = []
    logging.getLogger("polar_trl").addHandler(handler := logging.Handler())
    handler.emit = lambda record: warned.append(record.getMessage())
    engine = build_standalone_engine(
        model, cpu=True, max_model_len=128, max_num_seqs=4, dtype=dtype, rounding_seed=json.loads(seed)
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

    def run(name: str, dtype: str, seed: str) -> tuple[list[str], torch.Tensor]:
        out = tmp_path / "weight.safetensors"
        command = [find_warm_python(), "-c", ROUND, str(tmp_path / name), dtype, seed, str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        used, warned = json.loads(done.stdout.splitlines()[-1])
        assert used == f"torch.{dtype}"
        return warned, load_file(out)["weight"]

    warned, dithered = run("tuned", "bfloat16", "3")
    assert len(warned) == 1 and "is float32: its weights are rounded to bfloat16" in warned[0]
    assert torch.equal(dithered, round_weight(tuned.contiguous(), NAME, torch.bfloat16, seed=3, dithered=True).float())
    unwarned, nearest = run("tuned", "bfloat16", "null")
    assert unwarned == [] and torch.equal(nearest, tuned.to(torch.bfloat16).float())
    move = tuned - published

    def share(rounded: torch.Tensor) -> float:
        return float(((rounded - published) * move).sum() / (move * move).sum())

    assert share(nearest) < 0.8 and 0.9 < share(dithered) < 1.1
    for name, dtype, expected in (("published", "bfloat16", published), ("tuned", "float32", tuned)):
        warned, weight = run(name, dtype, "3")
        assert warned == [] and torch.equal(weight, expected)
