"""Run train.py with an engine whose key-value cache has a fixed size, so that several can start on one card.

  python scripts/gpu/fixed_cache.py scripts/train.py --config ...

vLLM would measure how much of the card is free before and after a trial pass, and stop where a neighbour gave memory
back meanwhile, as sleeping engines do at every step.
"""

import runpy
import sys

from polar_trl.engine.cuda_graphs import LLM_KWARGS

CACHE_BYTES = 4 << 30


def main() -> None:
    del sys.argv[0]
    for kwargs in LLM_KWARGS.values():
        kwargs["kv_cache_memory_bytes"] = CACHE_BYTES
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
