"""Test how scripts/quickstart.sh reads its arguments; nothing is installed, and no training runs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATED = r"runs/quickstart-seed{}-\d{{8}}-\d{{6}}"


def start(folder: Path, *arguments: str, fault: str = "") -> "subprocess.CompletedProcess[str]":
    """The script, where `python` prints what it is given; a `fault` is why the default sandbox does not work."""
    (folder / "scripts").mkdir()
    (folder / "bin").mkdir()
    shutil.copy(ROOT / "scripts" / "quickstart.sh", folder / "scripts")
    (folder / "scripts" / "install.sh").touch()
    fail = f'[ "$1" != -c ] || {{ echo "polar_trl.errors.SandboxError: {fault}" >&2; exit 1; }}\n' if fault else ""
    (folder / "bin" / "python").write_text(f'#!/bin/sh\n{fail}printf "%s|" "$@"\necho\n')
    (folder / "bin" / "python").chmod(0o755)
    (folder / "bin" / "polar-trl").symlink_to("python")
    return subprocess.run(
        ["bash", str(folder / "scripts" / "quickstart.sh"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "VENV": str(folder)},
        timeout=20,
    )


@pytest.mark.parametrize(
    ("arguments", "seed", "steps", "run", "rest"),
    [
        ([], 42, 20, DATED.format(42), ""),
        (["--seed", "7", "--steps", "12"], 7, 12, DATED.format(7), ""),
        (["--max_steps", "3", "--output_dir", "runs/my run"], 42, 3, "runs/my run", ""),
        (["--max-steps=3", "--output-dir=a=b", "--seed=1", "--lr=-1", "x"], 1, 3, "a=b", r"--lr=-1\|x\|"),
        (["--output_dir", "r", "--resume_from_checkpoint", "auto"], 42, 20, "r", r"--resume_from_checkpoint\|auto\|"),
    ],
)
def test_it_says_what_it_starts(
    tmp_path: Path, arguments: list[str], seed: int, steps: int, run: str, rest: str
) -> None:
    done = start(tmp_path, *arguments)
    said = re.fullmatch(rf"quickstart: {steps} steps into ({run}); .*\n", done.stderr)
    assert said, done.stderr
    given = rf"--seed\|{seed}\|--max_steps\|{steps}\|--output_dir\|{re.escape(said[1])}\|{rest}\n"
    assert re.match(rf"train\|quickstart\|{given}", done.stdout), done.stdout


@pytest.mark.parametrize("given", [[], ["--sandbox", "docker"], ["--sandbox=bwrap"]])
def test_where_the_default_sandbox_does_not_work_it_says_so_and_goes_on(tmp_path: Path, given: list[str]) -> None:
    done = start(tmp_path, *given, fault="no bwrap here; ask for --sandbox local")
    first = done.stderr.splitlines()[0]
    assert (first == "quickstart: no bwrap here; ask for --sandbox local; going on with it") == (not given)
    wanted = given or ["--sandbox", "local"]
    assert done.stdout.splitlines()[0].endswith("|".join(["", *wanted, ""])), done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "many"], "--steps takes a number"),
        (["--seed"], "--seed takes a number"),
        (["--output_dir="], "--output_dir takes a folder"),
        (["--resume_from_checkpoint", "auto"], "add --output_dir"),
        (["--resume-from-checkpoint=auto"], "add --output_dir"),
    ],
)
def test_it_refuses_in_one_sentence(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = start(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("quickstart: ") and message in done.stderr and done.stderr.count("\n") == 1
