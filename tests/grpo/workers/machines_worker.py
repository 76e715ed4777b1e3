"""Check what ranks have in common, as one of two that differ: `machines_worker.py OUT`, which each writes to."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from accelerate import PartialState

from polar_trl.errors import ConfigError
from polar_trl.grpo.logs import settings_log
from polar_trl.grpo.run import machines

out = Path(sys.argv[1])
rank = PartialState(cpu=True).process_index
machines.NUM_LOOKS = 2


@dataclass
class Settings:
    max_steps: int
    hub_token: str = ""


def catch(act: Callable[[], None]) -> str:
    try:
        act()
    except (ConfigError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def fail_on(rank_that_fails: int) -> None:
    with machines.failing_together():
        if rank == rank_that_fails:
            raise FileNotFoundError("no agent here")


def own(folder: Path) -> None:
    machines.own_output_dir(SimpleNamespace(output_dir=folder, process_index=rank))


versions = settings_log.list_versions()
said = {
    "alike": catch(lambda: machines.require_same_run(Settings(3, f"secret-token-{rank}"), agent="pi")),
    "settings": catch(lambda: machines.require_same_run(Settings(3 + rank), agent=("pi", "codex")[rank])),
    "objects": catch(lambda: machines.require_alike({"made": object()})),
    "long": catch(lambda: machines.require_alike({"text": "x" * 1000 + str(rank)})),
    "none fails": catch(lambda: fail_on(-1)),
    "one fails": catch(lambda: fail_on(1)),
    "shared": catch(lambda: own(out / "shared")),
    "again": catch(lambda: own(out / "shared")),
    "not shared": catch(lambda: own(out / f"of-rank{rank}")),
    "not writable": catch(lambda: own(Path("/proc/nothing"))),
}
machines.list_versions = lambda: {**versions, "vllm": f"0.31.{rank}"}
said["versions"] = catch(lambda: machines.require_same_run(Settings(3)))
(out / f"rank{rank}.json").write_text(json.dumps(said))
