#!/usr/bin/env python3
"""Run the quickstart so that its rewards can be compared between two versions of the code.

    python scripts/dev/seeded_quickstart.py --seed 1 --max_steps 3 --output_dir runs/seeded

A seed alone does not determine a run: agents ask at the same time, and the engine draws for them in the order of their
arrival. Here one agent runs at a time, and each request is sampled with a seed of its own, made of its prompt and of
how often that prompt was asked before. Options go to polar-trl train. Prints the mean reward of each step.
"""

import runpy
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    from polar_trl.engine.colocate import set_environment

    set_environment(cpu=True)
    from vllm.v1.engine.llm_engine import LLMEngine

    add_request, asked = LLMEngine.add_request, Counter[int]()

    def add_seeded(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        key = zlib.crc32(str(prompt["prompt_token_ids"]).encode())
        params.seed = (key + asked[key]) % 2**31
        asked[key] += 1
        return add_request(self, request_id, prompt, params, *args, **kwargs)

    LLMEngine.add_request = add_seeded
    options = ["--max_agents", "1", "--max_preparing", "1", "--max_grading", "1", *sys.argv[1:]]
    sys.argv = ["train.py", "--config", "quickstart", *options]
    runpy.run_path(str(ROOT / "scripts" / "train.py"), run_name="__main__")


if __name__ == "__main__":
    main()
