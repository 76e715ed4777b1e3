"""Sandboxes without root: the same sandbox, without limits of memory and disk, which it says.

Needs root to become an ordinary user, and a container engine: `scripts/test.sh` starts one.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import as_user
import pytest

pytestmark = pytest.mark.containers

SCRIPT = Path(__file__).with_name("ordinary_user.py")


@pytest.fixture
def home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="polar-user-"))  # and not tmp_path, which is root's alone
    yield folder
    shutil.rmtree(folder)


def report_of(kind: str, home: Path, **env: str) -> dict[str, Any]:
    with as_user.start(SCRIPT.read_text(), kind, home=home, env=env) as script:
        text, _ = script.communicate(timeout=240)
    assert script.returncode == 0
    report: dict[str, Any] = json.loads(text)
    return report


def test_bubblewrap(home: Path) -> None:
    report = report_of("bwrap", home)
    assert report["capabilities"] == {
        "cuts_network": True,
        "limits_memory": False,
        "limits_disk": False,
        "uses_images": False,
    }
    require_a_sandbox(report)


def require_a_sandbox(report: dict[str, Any]) -> None:
    uid = report["uid"]
    assert uid == as_user.UID
    assert report["basics"] == [3, f"/workspace\nhello\nold\n/home/agent 1\n{uid}\n", False]
    assert report["privilege"] == [0, "CapEff:\t0000000000000000\nNoNewPrivs:\t1\nno\n", False]
    assert report["files"] == [0, "", False]
    assert report["got"] == [[0, 255], True, "new\n"]
    assert report["tree"] == "old\n"
    assert report["deadline"] == [None, "started\n", True]
    assert report["daemon"] == [0, "", False] and report["daemon_is_dead"]
    assert report["killed"][0] in (None, 137) and not report["killed"][2]
    assert report["bomb"][0] == 0 and int(report["bomb"][1]) >= 200 - 64
    assert report["again"] == [0, "again\n", False]
    assert report["origin"] == [0, "http://127.0.0.1:8080\n", False]
    assert report["model"] == [0, "hi there\n", False]
    assert report["late"] == [None, "hi there\n", True]
    assert report["model_after_the_deadline"] == [0, "hi there\n", False]
    assert "refused" in report["other_port"][1] and "unreachable" in report["away"][1]
    assert "refused" in report["gone"][1] or "closed" in report["gone"][1]
    assert (report["left"], report["children"]) == ([], [])
