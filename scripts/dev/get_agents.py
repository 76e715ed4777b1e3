#!/usr/bin/env python3
"""Install agents at the versions that were verified; those that are there already cost nothing.

python scripts/dev/get_agents.py             all of them, about 2 GB
python scripts/dev/get_agents.py codex pi
"""

import sys

from polar_trl.errors import ConfigError
from polar_trl.harness import AGENTS, build_agent


def main() -> None:
    try:
        for name in sys.argv[1:] or AGENTS:
            build_agent(name).install()
    except ConfigError as error:
        sys.exit(f"get_agents: {error}")


if __name__ == "__main__":
    main()
