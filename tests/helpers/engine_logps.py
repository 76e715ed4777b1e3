"""Sample from a model by vLLM's CPU build and score the same tokens by the trainer, as a tree and each row alone.

  python tests/helpers/engine_logps.py MODEL PROMPTS.json OUT.json

A process of its own: it holds one vLLM. Only ids go in and out; the model needs no tokenizer.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tiny_vllm import build_tiny_vllm

from polar_trl.engine.base import GenerationParams

NUM_TOKENS = 24


def sample(model: str, prompts: list[list[int]]) -> list[Any]:
    llm = build_tiny_vllm(Path(model), skip_tokenizer_init=True, max_model_len=1024, max_num_batched_tokens=1024)
    from polar_trl.engine.vllm import VllmEngine

    engine = VllmEngine(llm)
    params = GenerationParams(max_tokens=NUM_TOKENS, temperature=1.0)

    async def generate() -> list[Any]:
        return await asyncio.gather(*(engine.generate(tuple(prompt), params) for prompt in prompts))

    completions = asyncio.run(generate())
    engine.close()
    return completions


def main() -> None:
    model, prompts = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    completions = sample(model, prompts)

    import torch
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    from polar_trl.grpo.packing.forward import choose_layout, pack_rows, prepare_model, score

    rows = [np.array([*prompt, *c.token_ids]) for prompt, c in zip(prompts, completions, strict=True)]
    scored = [np.arange(len(row)) >= len(prompt) for row, prompt in zip(rows, prompts, strict=True)]
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    found: dict[str, Any] = {"engine": [x for c in completions for x in c.logprobs], "alone": []}
    with torch.no_grad():
        for row, mask in zip(rows, scored, strict=True):
            ids = torch.from_numpy(row)
            logps = policy(input_ids=ids[None]).logits[0, np.flatnonzero(mask) - 1].log_softmax(-1)
            found["alone"] += logps.gather(-1, ids[mask][:, None])[:, 0].tolist()
        add_fused_lm_head(policy, outputs=("log_probs", "entropy"))
        found["chosen"] = choose_layout(policy, None)
        prepare_model(policy, "tree")
        for kind in ("tree", "packed"):
            packed = pack_rows(rows, scored, kind=kind, device=torch.device("cpu"))
            found[kind] = score(policy, packed)[0].tolist()
    Path(sys.argv[3]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
