"""Train Qwen3.5's published class for two steps and write down what happened: `hybrid_worker.py MODEL OUT lora|full`.

The engine is vLLM's CPU build, in bfloat16, and loads the same class.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3_5ForConditionalGeneration
from worker_common import build_trainer

from polar_trl.engine.base import GenerationParams


def sample_greedily(trainer: Any, prompt: tuple[int, ...]) -> Any:
    async def sample() -> Any:
        params = GenerationParams(max_tokens=24, temperature=0.0)
        return await trainer.vllm_generation.engine.generate(prompt, params)

    return asyncio.run(sample())


@torch.no_grad()
def measure_gap(model: Any, prompt: tuple[int, ...], completion: Any) -> float:
    """Largest difference (nats) between the engine's log-probabilities and a plain forward pass of this model."""
    ids = torch.tensor([prompt + completion.token_ids])
    logps = model.eval()(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    own = logps.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return (own - torch.tensor(completion.logprobs)).abs().max().item()


def load(folder: str | Path) -> Any:
    return Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def main(model: str, out: Path, is_full: bool) -> None:
    settings = {"max_steps": 2, "gradient_checkpointing": True, "learning_rate": 1e-2 if is_full else 5e-2}
    trainer = build_trainer(model, out, ["ok", "fork"] * 2, everything=not is_full, **settings)
    trainable = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    others = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    after = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())

    trainer.vllm_generation.sync_weights()
    prompt = tuple(trainer._tokenizer("The quick brown fox jumps over the lazy dog")["input_ids"])
    completion = sample_greedily(trainer, prompt)
    result: dict[str, Any] = {
        "log": trainer.state.log_history,
        "layout": trainer.layout_kind,
        "trainable": {name: (after[name] - before).abs().max().item() for name, before in trainable.items()},
        "others": {name: (after[name] - before).abs().max().item() for name, before in others.items()},
        "others_with_gradient": [name for name in others if after[name].grad is not None],
        "gap_first_weights": measure_gap(load(model), prompt, completion),
    }
    if is_full:
        trainer.save_model(str(out / "saved"))
        trainer.accelerator.wait_for_everyone()
        saved = load(out / "saved")
        result["gap_saved"] = measure_gap(saved, prompt, completion)
        saved_weights = dict(saved.named_parameters())
        result["saved_names"] = sorted(saved_weights) == sorted(after)
        result["saved_equal"] = all(torch.equal(saved_weights[name], p) for name, p in after.items())
    else:
        result["gap_merged"] = measure_gap(trainer.accelerator.unwrap_model(trainer.model), prompt, completion)
    trainer.close()
    if trainer.accelerator.is_main_process:
        (out / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "full")
