"""Sample from the real CPU engine with n-gram drafts: drafts_worker.py MODEL OUT."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

from tiny_vllm import build_tiny_vllm

from polar_trl.engine.base import GenerationParams
from polar_trl.types import Completion

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
PROMPTS = [tuple(j * (i + 3) % 12 for j in range(30)) for i in range(8)]


def main(model: Path, out: Path) -> None:
    runs = []
    llm = build_tiny_vllm(model, speculative_config=DRAFTS, skip_tokenizer_init=True)
    from polar_trl.engine.vllm import VllmEngine

    num_steps, step = 0, llm.llm_engine.step

    def counting() -> Any:
        nonlocal num_steps
        num_steps += 1
        return step()

    llm.llm_engine.step = counting
    engine = VllmEngine(llm)
    for temperature in (0.1, 1.0):
        num_steps = 0
        params = GenerationParams(max_tokens=200, temperature=temperature)

        async def sample(params: GenerationParams = params) -> list[Completion]:
            return list(await asyncio.gather(*(engine.generate(prompt, params) for prompt in PROMPTS)))

        answers = [
            (prompt, completion.token_ids, completion.logprobs)
            for prompt, completion in zip(PROMPTS, asyncio.run(sample()), strict=True)
        ]
        runs.append({"temperature": temperature, "num_steps": num_steps, "answers": answers})
    engine.close()
    out.write_text(json.dumps(runs))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
