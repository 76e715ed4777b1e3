"""Join what the parts of scripts/test_machines.sh found into one file: `join_results.py FOLDER FILE`.

Counts of several parts add up, and a key that no part has is null.
"""

import json
import sys
from collections import Counter
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

parts = {path.stem: json.loads(path.read_text()) for path in sorted(Path(sys.argv[1]).glob("*.json"))}
joined: dict[str, Any] = {}
for name in ("sessions", "per_node", "lost", "left_behind", "weights_equal", "resumed_equal"):
    found = [part[name] for part in parts.values() if name in part]
    joined[name] = reduce(add, (Counter(one) if isinstance(one, dict) else one for one in found)) if found else None
joined["parts"] = parts
Path(sys.argv[2]).write_text(json.dumps(joined, indent=1) + "\n")
print(json.dumps(joined, indent=1))
