"""Attack a sandbox from inside: run there with a name and JSON, with the standard library only.

The last line is `TRIED` and a JSON list of what succeeded, in words. Nothing is harmed where an attack succeeds, not
even without a sandbox: limits are passed by a little, settings are opened and not written, the only processes that are
signalled and the only files that are changed are those that the caller made for it.
"""

import json
import sys

from polar_trl.tools.security.inside import kernel, limits, reach


def main() -> None:
    """Run the attack that the command line names."""
    name, given = sys.argv[1], json.loads(sys.argv[2])
    attack = {**vars(limits), **vars(reach), **vars(kernel)}[name]
    print("TRIED", json.dumps(list(dict.fromkeys(attack(given)))), flush=True)


if __name__ == "__main__":
    main()
