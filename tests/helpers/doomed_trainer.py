"""Run commands in a bubblewrap and a container sandbox, as a trainer that is to be killed. Started by `test_faults`.

Arguments: where sandboxes are kept, and a token for their environment. Prints its owner tag, then "running".
"""

import sys
import threading
from pathlib import Path

from faults import MARK, build

from polar_trl.sandbox.base import Sandbox
from polar_trl.sandbox.owner import build_owner_tag
from polar_trl.types import Task


def main() -> None:
    root, token = Path(sys.argv[1]), sys.argv[2]
    print(build_owner_tag(), flush=True)
    boxes = [
        build(kind, root).create(Task(id="t", instruction="x"), f"{token}-{kind}") for kind in ("bwrap", "docker")
    ]
    threads = [threading.Thread(target=run, args=(box, token)) for box in boxes]
    for thread in threads:
        thread.start()
    for box in boxes:
        while box.get("started") is None:
            threading.Event().wait(0.05)
    print("running", flush=True)
    for thread in threads:
        thread.join()


def run(box: Sandbox, token: str) -> None:
    box.run("setsid sleep 600 & echo > started; sleep 600", env={MARK: token}, timeout_s=600)


if __name__ == "__main__":
    main()
