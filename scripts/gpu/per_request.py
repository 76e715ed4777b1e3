"""Run train.py with a row for each model call, instead of rows merged by token prefix.

  python scripts/gpu/per_request.py scripts/train.py --config ...

The baseline of the paper's ablation. It trains the same sampled tokens, and forwards each history once per call where
`sequence_layout` is packed or single (the default tree forwards prefixes that rows share once, all the same).
"""

import runpy
import sys

from polar_trl.rollout import session_run


def main() -> None:
    del sys.argv[0]
    session_run.BUILDER = "per_request"
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
