"""Join what the parts of scripts/test_machines.sh found into one file: `join_results.py FOLDER FILE`."""

import json
import sys
from collections import Counter
from pathlib import Path

parts = {path.stem: json.loads(path.read_text()) for path in sorted(Path(sys.argv[1]).glob("*.json"))}
per_node: Counter[str] = Counter()
for found in parts.values():
    per_node.update(found.get("per_node", {}))
whole = {name: sum(found[name] for found in parts.values()) for name in ("sessions", "left_behind")}
counts = [found["lost"] for found in parts.values() if "lost" in found]
lost = sum(counts) if counts else None  # not every part counts them
ranks = {name: parts.get("c", {}).get(name) for name in ("weights_equal", "resumed_equal")}
joined = {**whole, "lost": lost, "per_node": per_node, **ranks, "parts": parts}
Path(sys.argv[2]).write_text(json.dumps(joined, indent=1) + "\n")
print(json.dumps(joined, indent=1))
