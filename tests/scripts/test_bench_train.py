"""bench_train.py on short sessions behind one agent's prompt: a tree against packed rows, and its goal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import ROOT


def run_bench(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "scripts/bench_train.py", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="sizes are those of a CPU")
def test_an_agent_s_prompt_is_kept_over_the_passes_of_a_tree(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    done = run_bench("--sets", "qwen_code", "--scale", "0.01", "--group_size", "4", "--json", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(out.read_text())
    found, packed, tree = (
        report["tree"]["qwen_code"],
        *(report["sets"]["qwen_code"][f"{way}_merged"] for way in ("packed", "tree")),
    )
    assert packed["passes"] == tree["passes"] == 4 and packed["compiled"] == tree["compiled"] == 0
    # 184 or 185 tokens of the prompt are there twice, not four times
    assert 2 * 184 - 10 <= packed["tokens"] - tree["tokens"] <= 2 * 185
    assert found["tokens_allow"] > found["operations_allow"] > 1
    assert found["goal"] == 1.6 and found["met"] == (found["speedup"] >= 1.6)
    assert ("met" if found["met"] else "missed") in done.stdout and "tokens allow" in done.stdout
    assert done.stdout.index("qwen_code packed_merged: 4 rows") < done.stdout.index("seconds per step")


def test_an_unknown_set_is_named_with_those_there_are() -> None:
    done = run_bench("--sets", "qwen")
    assert done.returncode == 2
    assert "argument --sets: invalid choice: 'qwen'" in done.stderr and "'qwen_code'" in done.stderr
