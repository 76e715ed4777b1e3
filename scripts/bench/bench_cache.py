"""Simulate sessions whose histories do not all fit the engine's cache, with and without admission by room.

    python scripts/bench/bench_cache.py [--kv-tokens 640000] [--steps 12] [--reserved 0.9] [--json FILE]

The engine, the sessions and the training step are those of scripts/bench_overlap.py, on one rank; who is admitted is
decided by the package's own gate. `--reserved` are shares of the expected length that are kept free for each resident
(`cache_room.RESERVED` where none is given).
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_overlap import COLUMNS, Run, Setting, print_rows

from polar_trl.engine import cache_room

SHOWN = COLUMNS | {"admission": lambda row: str(row["admission"])}
TITLES = ("agents per slot, lag", "admission", "s per step", "slots", "tokens/s", "prefilled per sampled")


def simulate(kv_tokens: int, steps: int, seed: int, reserved: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Give rows by agents per slot, lag and admission."""
    for lag, times in ((0, 1), (0, 2), (0, 4), (1, 1), (1, 2), (1, 4), (2, 4)):
        setting = Setting(
            name=f"{times}x, lag {lag}",
            num_ranks=1,
            agents_per_slot=times,
            max_policy_lag=lag,
            steps=steps,
            seed=seed,
            kv_tokens=kv_tokens,
        )
        yield Run(setting).run() | {"admission": "none"}
        for share in reserved:
            cache_room.RESERVED = share
            yield Run(setting, capacity=kv_tokens).run() | {"admission": f"by room, {share:g} reserved"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-tokens", type=int, default=640_000, help="that the cache has room for")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reserved", type=float, nargs="+", default=[cache_room.RESERVED])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []

    def render(row: dict[str, Any]) -> list[str]:
        rows.append(row)
        return [SHOWN[title](row) for title in TITLES]

    print_rows(TITLES, map(render, simulate(args.kv_tokens, args.steps, args.seed, args.reserved)))
    if args.json is not None:
        args.json.write_text(json.dumps({"kv_tokens": args.kv_tokens, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
