"""The page about clusters, and what it points to."""

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from doc_pages import find_blocks, list_lines

from polar_trl.sandbox.limits import Limits
from polar_trl.types import StopReason

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "cluster.md"
AGENTS = 64


def test_the_extra_has_the_version_that_is_tested() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = re.fullmatch(r"ray>=([\d.]+),<([\d.]+)", extras["ray"][0])
    assert found is not None and extras["ray"][0] in extras["dev"]
    least, end, own = (
        [int(part) for part in v.split(".")] for v in (*found.groups(), importlib.metadata.version("ray"))
    )
    assert least <= own < end


def test_the_manifest_has_room_for_what_the_page_says() -> None:
    spec = yaml.safe_load((ROOT / "examples" / "cluster" / "ray-cluster.yaml").read_text())["spec"]
    (group,) = spec["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    per_node = min(int(limits["cpu"]) // Limits().cpus, int(limits["memory"].removesuffix("Gi")) * 1024 // 4096)
    assert group["replicas"] * per_node >= AGENTS
    assert "bwrap" in group["rayStartParams"]["resources"]
    names = {each["name"] for each in group["template"]["spec"]["containers"][0]["env"]}
    page = PAGE.read_text()
    assert names == set(re.findall(r"(?:RAY|GRPC)_\w+(?==)", "\n".join(find_blocks(PAGE, "bash"))))
    assert all(name in page for name in names)


def test_the_commands_make_certificates_that_the_authority_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [
        line for block in find_blocks(PAGE, "bash") for line in list_lines(block) if line.startswith("openssl")
    ]
    for command in commands:
        subprocess.run(command, shell=True, check=True, capture_output=True)
    check = ["openssl", "verify", "-CAfile", "ca.pem", "-verify_ip", "10.0.0.2", "node.pem"]
    assert "OK" in subprocess.run(check, check=True, capture_output=True, text=True).stdout
    assert len(Path("token").read_text().strip()) == 64


def test_the_page_names_the_stop_reason_and_tests_that_exist() -> None:
    page = PAGE.read_text()
    assert "worker_lost" in page and "worker_lost" in str(StopReason)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    missing = [name for name in re.findall(r"`(test_\w+)`", page) if f"def {name}(" not in tests]
    assert not missing
