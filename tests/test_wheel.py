"""Test the wheel by itself: built, installed in an empty folder, it makes its model and trains the quickstart.

The environment has the wheel, and what it depends on from the environment of the tests.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from polar_trl.cache import CACHE_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("polar_trl", "docs", "examples", "scripts", "tests", "constraints", ".ci")
SMALL = (
    *("--max_steps", "1", "--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "4"),
    *("--num_generations", "4", "--drop_zero_variance", "false", "--entropy_coef", "0.01", "--sandbox", "local"),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source archive, built in a copy: a build leaves files behind."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for path in ROOT.glob("[!.]*"):
        if path.is_file():
            shutil.copy(path, copy)
    build = "import sys, setuptools.build_meta as b; out = sys.argv[1]; b.build_wheel(out); b.build_sdist(out)"
    done = subprocess.run(
        [sys.executable, "-c", build, str(out)], cwd=copy, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,), (archive,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, archive


@pytest.fixture(scope="module")
def environment(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment whose only package of its own is the wheel."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=600)
    (site,) = folder.glob("lib/python*/site-packages")
    # a line of a .pth is added behind the environment's own packages, and that folder's .pth files are not read
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-deps"]
    done = subprocess.run(
        [*install, "--no-index", "--ignore-installed", str(built[0])], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "bin"


def run(environment: Path, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run `polar-trl` in a folder, with a cache, a HOME and a /tmp that are empty at first."""
    for name in ("home", "cache", "t", "work"):
        (folder / name).mkdir(exist_ok=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HOME": str(folder / "home"), CACHE_VARIABLE: str(folder / "cache"), "TMPDIR": str(folder / "t")}
    return subprocess.run(
        [str(environment / "polar-trl"), *words],
        cwd=folder / "work",
        env=env,
        capture_output=True,
        text=True,
        timeout=550,
    )


def test_it_trains_the_quickstart_in_an_empty_folder(environment: Path, tmp_path: Path) -> None:
    done = run(environment, tmp_path, "train", "quickstart", *SMALL)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    summary = json.loads((tmp_path / "work" / "runs" / "quickstart" / "summary.json").read_text())
    assert summary["steps"] == 1
    assert (tmp_path / "cache" / "models" / "SmolLM2-135M-Instruct" / "model.safetensors").exists()
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["runs"]
    sockets = [path for path in (tmp_path / "t").rglob("*") if path.is_socket() or path.name.startswith("vllm-")]
    assert not sockets


def test_it_shows_its_run_files(environment: Path, tmp_path: Path) -> None:
    listed = run(environment, tmp_path, "configs").stdout
    assert "quickstart" in listed and "fsdp2" in listed
    path = Path(run(environment, tmp_path, "configs", "fsdp2", "--path").stdout.strip())
    assert path.is_file() and environment.parent in path.parents


def test_what_the_wheel_and_the_archive_hold(built: tuple[Path, Path]) -> None:
    wheel, archive = built
    names = zipfile.ZipFile(wheel).namelist()
    package = {path for path in (ROOT / "polar_trl").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path.relative_to(ROOT).as_posix() for path in package} == {n for n in names if ".dist-info/" not in n}
    (metadata,) = (zipfile.ZipFile(wheel).read(name).decode() for name in names if name.endswith("/METADATA"))
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    with tarfile.open(archive) as held:
        inside = {name.partition("/")[2] for name in held.getnames()}
    assert {"LICENSE", "CITATION.cff", "SECURITY.md", "docs/README.md", "tests/test_wheel.py", ".ci/run"} <= inside
    assert not [name for name in inside if "__pycache__" in name]
