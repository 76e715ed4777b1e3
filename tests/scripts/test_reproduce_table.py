"""Test scripts/reproduce_table.py: two cells for real in miniature, the whole table from recorded results."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from launch import find_warm_python

from polar_trl.eval.sample_tasks import SampleResult
from polar_trl.eval.summary import build_summary

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "scripts" / "reproduce_table.py")
AGENTS = ("codex", "claude_code", "qwen_code", "pi")


@pytest.fixture()
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import reproduce_table

    return reproduce_table


def call(*arguments: str, timeout: int = 200) -> "subprocess.CompletedProcess[str]":
    """Run the script, and the evaluations that it starts, in warm Pythons."""
    python = find_warm_python()
    env = {**os.environ, "PYTHONEXECUTABLE": python}
    command = [python, SCRIPT, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)


def test_two_cells_for_real_one_of_which_fails_at_first(tmp_path: Path, smollm2: Path) -> None:
    out = tmp_path / "table"
    keys = ["--out", str(out), "--agents", "shell", "--config", "quickstart", "--base", str(smollm2)]
    keys += ["--tasks", "polar_trl/configs/tasks/shell_ladder.jsonl"]
    extra = ["--", "--task_ids", "copy_command-0-0000", "copy_command-0-0002", "--max_session_calls", "1"]
    done = call(*keys, "--trained", "shell=/no/such/model", *extra)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "trained-shell__shell failed with exit status 2; going on with the next" in done.stderr
    table = json.loads((out / "table.json").read_text())
    states = {name: cell["state"] for name, cell in table["cells"].items()}
    assert states == {"base__shell": "done", "trained-shell__shell": "failed"}, done.stderr[-3000:]
    assert not table["complete"]
    results = (out / "base__shell" / "results.jsonl").read_bytes()

    done = call(*keys, "--trained", f"shell={smollm2}", *extra)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "0 sessions are left to run" in done.stderr  # the base cell was not run again
    assert (out / "base__shell" / "results.jsonl").read_bytes() == results
    table = json.loads((out / "table.json").read_text())
    assert table["complete"] and table["differences"] == []
    for cell in table["cells"].values():
        assert cell["sessions"] == {"wanted": 2, "graded": 2, "passed": cell["sessions"]["passed"]} | {
            "failed": 0, "missing": 0,
        }  # fmt: skip
        assert cell["pass_at_1"]["rate"] == cell["sessions"]["passed"] / 2
    rates = [table["cells"][name]["pass_at_1"]["rate"] for name in ("base__shell", "trained-shell__shell")]
    assert table["gains"]["trained-shell__shell"]["rate"] == pytest.approx(rates[1] - rates[0])
    assert (out / "table.md").read_text() + "\n" == done.stdout
    assert call("--render-only", str(out), "--agents", "shell").stdout == done.stdout


def record_cell(out: Path, name: str, passed: int, *, num_tasks: int = 10, **settings: Any) -> None:
    """A cell as `polar-trl eval` leaves it, of which the first tasks were passed and one could not be graded."""
    folder = out / name
    folder.mkdir(parents=True)
    results = [
        SampleResult(
            task=f"t{number}", sample=0, attempt=1, rollout=f"r{number}", record=f"sessions/s/r{number}.jsonl",
            repo=None, reward=None if number == num_tasks - 1 else float(number < passed), error=None,
            stop_reason="completed", calls=3, sampled_tokens=50, seconds={},
        )
        for number in range(num_tasks)
    ]  # fmt: skip
    summary = build_summary([r.task for r in results], results, num_samples=1, ks=[1])
    about = {"model": name, "task_set": "swe-bench-verified", "num_samples": 1}
    lines = (json.dumps({key: getattr(r, key) for key in SampleResult.__dataclass_fields__}) + "\n" for r in results)
    (folder / "results.jsonl").write_text("".join(lines))
    (folder / "summary.json").write_text(json.dumps(about | summary))
    (folder / "settings.json").write_text(json.dumps({"tasks": "10 tasks aa", "temperature": 1.0} | settings))


def test_the_table_and_the_matrix_from_recorded_results(tmp_path: Path, script: ModuleType) -> None:
    for agent in AGENTS:
        record_cell(tmp_path, f"base__{agent}", 2)
        record_cell(tmp_path, f"trained-{agent}__{agent}", 5)
    record_cell(tmp_path, "trained-pi__codex", 1)
    report = script.build_report(tmp_path, AGENTS)
    assert report["complete"]
    # 2 and 5 of the 9 that were graded
    assert report["cells"]["base__pi"]["pass_at_1"]["rate"] == pytest.approx(2 / 9)
    assert report["gains"]["trained-pi__pi"]["rate"] == pytest.approx(3 / 9)
    assert report["gains"]["trained-pi__codex"]["rate"] == pytest.approx(-1 / 9)
    assert report["gains"]["trained-pi__pi"]["tasks"] == 9
    lines = list(script.render_report(report))
    table = lines[: lines.index("## Trained inside one agent, evaluated inside another")]
    for agent, (base, trained, gain) in {
        "codex": ("3.8", "26.4", "+22.6"),
        "claude_code": ("29.8", "34.6", "+4.8"),
        "qwen_code": ("34.6", "35.2", "+0.6"),
        "pi": ("34.2", "40.4", "+6.2"),
    }.items():
        (row,) = (line for line in table if line.startswith(f"| {agent} |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[:4] == [agent, base, trained, gain]
        assert cells[4] == "22.2 (6.3 to 54.7)" and cells[5] == "55.6 (26.7 to 81.1)"
        assert cells[6].startswith("+33.3 (") and cells[7] == "1 / 1"
    matrix = lines[lines.index("## Trained inside one agent, evaluated inside another") :]
    (row,) = (line for line in matrix if line.startswith("| pi |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1].startswith("11.1 (") and "; -11.1 (" in cells[1]
    assert cells[2:4] == ["missing", "missing"] and cells[4].startswith("55.6 (")


def test_cells_that_are_not_of_one_kind_are_named(tmp_path: Path, script: ModuleType) -> None:
    record_cell(tmp_path, "base__pi", 2)
    record_cell(tmp_path, "trained-pi__pi", 5, temperature=0.6)
    (tmp_path / "base__codex").mkdir()
    (tmp_path / "base__codex" / "settings.json").write_text('{"tasks": "3 tasks bb", "temperature": 1.0}')
    report = script.build_report(tmp_path, AGENTS)
    assert not report["complete"]
    assert report["differences"] == [
        "base__pi: tasks is '10 tasks aa', and '3 tasks bb' in base__codex",
        "trained-pi__pi: tasks is '10 tasks aa', and '3 tasks bb' in base__codex",
        "trained-pi__pi: temperature is 0.6, and 1.0 in base__codex",
    ]
    text = "\n".join(script.render_report(report))
    assert text.count("**Not one setting**") == 3
    assert "| codex | 3.8 | 26.4 | +22.6 | begun | missing | - | - / - |" in text
    done = call("--render-only", str(tmp_path))  # the agents whose cells are there, in the paper's order
    rows = [line.split(" |")[0] for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows == ["| agent", "| codex", "| pi", "| trained inside", "| nothing (base)", "| codex", "| pi"]


def test_what_is_compared_with_what(tmp_path: Path, script: ModuleType) -> None:
    """A model's settings across agents, an agent's across models, and all others across all cells."""
    for model in ("base", "trained-pi"):
        for agent in ("codex", "pi"):
            record_cell(tmp_path, f"{model}__{agent}", 2, model=model, agent_version=agent, thinking=None)
    assert script.build_report(tmp_path, AGENTS)["differences"] == []
    path = tmp_path / "trained-pi__pi" / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": "x", "agent_version": "2", "thinking": True}))
    assert script.build_report(tmp_path, AGENTS)["differences"] == [
        "trained-pi__pi: model is 'x', and 'trained-pi' in trained-pi__codex",
        "trained-pi__pi: agent_version is '2', and 'pi' in base__pi",
        "trained-pi__pi: thinking is True, and None in base__codex",
    ]


def test_one_broken_cell_leaves_the_others_alone(tmp_path: Path, script: ModuleType) -> None:
    for agent in AGENTS:
        record_cell(tmp_path, f"base__{agent}", 2)
        record_cell(tmp_path, f"trained-{agent}__{agent}", 5)
    (tmp_path / "base__codex" / "summary.json").write_text('{"model": ')
    (tmp_path / "base__claude_code" / "settings.json").write_text("[")
    (tmp_path / "trained-qwen_code__qwen_code" / "results.jsonl").write_text("{}\n")
    path = tmp_path / "trained-pi__pi" / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps(summary | {"pass_at": {"4": summary["pass_at"]["1"]}}))
    report = script.build_report(tmp_path, AGENTS)
    text = "\n".join(script.render_report(report))
    assert "| codex | 3.8 | 26.4 | +22.6 | unreadable | 55.6 (26.7 to 81.1) | - | - / 1 |" in text
    assert "| claude_code | 29.8 | 34.6 | +4.8 | 22.2 (6.3 to 54.7) | 55.6 (26.7 to 81.1) | +33.3" in text
    assert "| qwen_code | 34.6 | 35.2 | +0.6 | 22.2 (6.3 to 54.7) | 55.6 (26.7 to 81.1) | - | 1 / 1 |" in text
    assert "| pi | 34.2 | 40.4 | +6.2 | 22.2 (6.3 to 54.7) | no pass@1 | - | 1 / 1 |" in text
    assert not report["complete"]
    assert [line.split(": ")[0] for line in report["differences"]] == ["base__claude_code"]
    assert text.count(f"\nbase__codex: {tmp_path}/base__codex/summary.json: JSONDecodeError(") == 1
    assert text.count(f"no gains: {tmp_path}/trained-qwen_code__qwen_code/results.jsonl, line 1") == 1


CELL = """
import signal, sys, time
def end(*_):
    time.sleep(0.2)
    print("tidied up", flush=True)
    sys.exit(130)
signal.signal(signal.SIGTERM, end)
print("begun", flush=True)
time.sleep(60)
"""
RUN = """
import signal, sys
if sys.argv[1] == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
import reproduce_table as script
_, _, code, out = sys.argv
script.build_command = lambda *_: [sys.executable, "-c", code]
sys.argv[1:] = ["--out", out, "--base", "m", "--agents", "pi", "codex", "--config", script.CONFIG]
script.main()
"""


@pytest.mark.parametrize(
    ("number", "sigint"),
    [(signal.SIGTERM, "ignored"), (signal.SIGINT, "heeded"), (signal.SIGKILL, "ignored")],
)
def test_what_ends_it_ends_the_cell_first(tmp_path: Path, number: signal.Signals, sigint: str) -> None:
    command = [sys.executable, "-c", RUN, sigint, CELL, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT / "scripts", stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while process.stderr.readline() != "begun\n":
            assert process.poll() is None
        process.send_signal(number)
        rest = process.stderr.read()
    ended = "tidied up\n"
    if number == signal.SIGKILL:
        assert (process.returncode, rest) == (-signal.SIGKILL, ended)
    else:
        assert (process.returncode, rest) == (130, ended + "stopped in base__pi; the same command goes on\n")


def test_the_commands_of_a_dry_run(tmp_path: Path) -> None:
    keys = ["--out", str(tmp_path / "o"), "--base", "Qwen/Qwen3.5-4B", "--trained", "codex=runs/codex", "pi=runs/pi"]
    done = call(*keys, "--dry-run", "--", "--num_engines", "8")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    assert lines[0].split(" -m ")[1] == (
        "polar_trl eval --config swe_8gpu --agent codex --tasks swe-bench-verified "
        f"--model_name_or_path Qwen/Qwen3.5-4B --output_dir {tmp_path / 'o' / 'base__codex'} --num_engines 8"
    )
    done = call(*keys, "--dry-run", "--transfer")
    folders = [Path(line.split("--output_dir ")[1].split()[0]).name for line in done.stdout.splitlines()]
    assert len(folders) == len(set(folders)) == 4 + 2 + 6
    assert folders[4:6] == ["trained-codex__codex", "trained-pi__pi"] and "trained-pi__claude_code" in folders
    assert not (tmp_path / "o").exists()


def test_the_documented_commands() -> None:
    text = (ROOT / "docs" / "eval.md").read_text(encoding="utf-8").replace("\\\n", " ")
    gain, paper = re.findall(r"^python scripts/reproduce_table\.py (.*)$", text, re.MULTILINE)
    for line, count, end in (
        (gain, 2, " --num_samples 4"),
        (paper, 4 + 16, " --num_engines 8"),
    ):
        words = shlex.split(line)
        done = call(*words[: words.index("--")], "--dry-run", *words[words.index("--") :])
        assert done.returncode == 0, done.stderr
        commands = done.stdout.splitlines()
        assert len(commands) == count
        assert all(command.endswith(end) for command in commands)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base", "m"], "give --out, and --base or --trained"),
        (["--out", "o", "--trained", "codex"], "'codex' is not AGENT=MODEL"),
        (["--out", "o", "--trained", "goose=m"], "--trained names 'goose'"),
        (["--out", "o", "--trained", "pi=a", "--trained", "pi=b"], "--trained names 'pi' twice"),
        (["--out", "o", "--base", "m", "--agents", "pi", "pi"], "--agents names 'pi' twice"),
        (
            ["--out", "o", "--base", "m", "--config", "no/{agent}.yaml"],
            "--config for 'codex': no file at 'no/codex.yaml'",
        ),
        (["--render-only", "docs"], "docs is no folder of cells"),
    ],
)
def test_one_sentence(arguments: list[str], message: str) -> None:
    done = call(*arguments)
    assert done.returncode == 2
    assert message in done.stderr.strip().splitlines()[-1]
