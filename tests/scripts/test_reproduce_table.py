"""Test scripts/reproduce_table.py: two cells for real in miniature, tables of recorded cells, commands, bad input."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launch import find_warm_python
from table.picture import draw_report, render_rate
from table.report import build_report, render_report
from table.steps import Settings, list_steps
from table.summaries import build_summaries, find_agents, find_models, load_summaries, write_summaries
from table_cells import read_rows, record_cell

from polar_trl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "scripts" / "reproduce_table.py")
AGENTS = ("codex", "claude_code", "qwen_code", "pi")


def call(*arguments: str, timeout: int = 200) -> "subprocess.CompletedProcess[str]":
    """Run the script, and the evaluations that it starts, in warm Pythons."""
    python = find_warm_python()
    env = {**os.environ, "PYTHONEXECUTABLE": python}
    command = [python, SCRIPT, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)


def test_two_cells_for_real_one_of_which_fails_at_first(tmp_path: Path, smollm2: Path) -> None:
    out = tmp_path / "table"
    keys = ["--out", str(out), "--agents", "shell", "--config", "quickstart", "--base", str(smollm2)]
    keys += ["--tasks", "polar_trl/configs/tasks/shell_ladder.jsonl", "--stages", "base", "grpo"]
    extra = ["--", "--task_ids", "copy_command-0-0000", "copy_command-0-0002", "--max_session_calls", "1"]
    done = call(*keys, "--trained", "shell=/no/such/model", *extra)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "grpo-shell-0__shell failed with exit status 2; going on with the next" in done.stderr
    table = json.loads((out / "table.json").read_text())
    assert not table["complete"]
    assert (table["cells"]["base"]["shell"]["num_done"], table["cells"]["grpo"]["shell"]["states"]) == (1, ["failed"])
    results = (out / "base__shell" / "results.jsonl").read_bytes()

    done = call(*keys, "--trained", f"shell={smollm2}", *extra)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[1/2] base__shell is there" in done.stderr
    assert (out / "base__shell" / "results.jsonl").read_bytes() == results
    table = json.loads((out / "table.json").read_text())
    assert table["complete"] and table["differences"] == []
    base, trained = (table["cells"][stage]["shell"] for stage in ("base", "grpo"))
    passed = [json.loads((out / f"{name}__shell" / "summary.json").read_text()) for name in ("base", "grpo-shell-0")]
    assert [base["rate"]["rate"], trained["rate"]["rate"]] == [p["sessions"]["passed"] / 2 for p in passed]
    assert trained["gain"]["rate"] == pytest.approx(trained["rate"]["rate"] - base["rate"]["rate"])
    assert (out / "table.md").read_text() == done.stdout
    assert call("--render-only", "--out", str(out)).stdout == done.stdout
    assert call("--render-only", "--from", str(out / "summaries")).stdout == done.stdout
    costs = [json.loads(line) for line in (out / "times.jsonl").read_text().splitlines()]
    assert [(cost["step"], cost["status"]) for cost in costs] == [
        ("base__shell", 0), ("grpo-shell-0__shell", 2), ("grpo-shell-0__shell", 0),
    ]  # fmt: skip
    assert all(cost["seconds"] > 0 for cost in costs)


def report_of(out: Path) -> dict[str, Any]:
    return build_report(build_summaries(out, find_models(out), find_agents(out)))


def test_the_papers_table_and_the_matrix_from_recorded_results(tmp_path: Path) -> None:
    for agent in AGENTS:
        record_cell(tmp_path, f"base__{agent}", 2)
        record_cell(tmp_path, f"grpo-{agent}-0__{agent}", 5)
    record_cell(tmp_path, "grpo-pi-0__codex", 1)
    report = report_of(tmp_path)
    assert report["complete"] and (report["agents"], report["seeds"]) == (list(AGENTS), [0])
    # 2 and 5 of the 9 that were graded
    assert report["cells"]["base"]["pi"]["rate"]["rate"] == pytest.approx(2 / 9)
    assert report["matrix"]["pi"]["pi"]["gain"]["rate"] == pytest.approx(3 / 9)
    assert report["matrix"]["pi"]["codex"]["gain"]["rate"] == pytest.approx(-1 / 9)
    assert report["matrix"]["pi"]["pi"]["gain"]["num_tasks"] == 9
    text = "\n".join(render_report(report))
    for agent, paper in {
        "codex": ["3.8", "26.4", "+22.6"],
        "claude_code": ["29.8", "34.6", "+4.8"],
        "qwen_code": ["34.6", "35.2", "+0.6"],
        "pi": ["34.2", "40.4", "+6.2"],
    }.items():
        assert read_rows(text)[agent] == [*paper, "22.2 (6.3 to 54.7)", "55.6 (26.7 to 81.1)"]
    gains = read_rows(text, "Gain over the base model, and its cost")
    assert gains["pi"][1].startswith("+33.3 (") and gains["pi"][2:] == ["55.6", "-", "-", "-", "1"]
    matrix = read_rows(text, "Trained inside one agent, evaluated inside another")
    assert matrix["pi"][0].startswith("11.1 (") and "; -11.1 (" in matrix["pi"][0]
    assert matrix["pi"][1:3] == ["missing", "missing"] and matrix["pi"][3].startswith("55.6 (")


def record_training(out: Path, name: str, seconds: float, cpu_seconds: float) -> None:
    line = {"step": name, "status": 0, "seconds": seconds, "cpu_seconds": cpu_seconds, "command": []}
    with (out / "times.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_a_table_of_seeds_with_missing_cells_and_what_a_point_costs(tmp_path: Path) -> None:
    for agent in ("codex", "pi"):
        record_cell(tmp_path, f"base__{agent}", 2, num_tasks=11)
    for seed, passed in enumerate((5, 6, 7)):
        record_cell(tmp_path, f"both-pi-{seed}__pi", passed, num_tasks=11)
        for name in (f"sft-pi-{seed}", f"both-pi-{seed}"):
            record_training(tmp_path, name, 900, 1620)
    record_training(tmp_path, "data-pi", 300, 360)
    record_cell(tmp_path, "both-codex-0__codex", 10, num_tasks=11)
    (tmp_path / "both-codex-1").mkdir()
    report = report_of(tmp_path)
    assert not report["complete"] and (report["seeds"], report["stages"]) == ([0, 1, 2], ["base", "both"])
    text = "\n".join(render_report(report))
    pi, codex = (read_rows(text)[agent] for agent in ("pi", "codex"))
    assert pi[-1].startswith("60.0 (") and codex[-1].startswith("100.0 (")
    assert codex[-1].endswith(", 1 of 3 seeds (missing)")
    gain, *rest = read_rows(text, "Gain over the base model, and its cost")["pi"][1:]
    # 40 points for (2 x 1620 + 360) s: one hour
    assert gain.startswith("+40.0 (") and rest == ["50.0, 60.0, 70.0", "0.58", "1", "0.025", "3"]
    matrix = read_rows(text, "Trained inside one agent, evaluated inside another")
    assert matrix["codex"][1] == "missing" and matrix["nothing (base)"][0].startswith("20.0 (")
    wanted = build_report(build_summaries(tmp_path, find_models(tmp_path), []), ["pi"], [0, 7], ["base", "sft"])
    assert wanted["cells"]["sft"]["pi"]["states"] == ["missing"] and wanted["cells"]["sft"]["pi"]["num_wanted"] == 2


def record_run(folder: Path, seconds: float, gpus: int, **keys: Any) -> None:
    """A run as `polar-trl train` leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    start = {"processes": 8, "hardware": {"gpus": ["H100"] * gpus, "cpus": 2}, "git_commit": folder.name}
    (folder / "summary.json").write_text(json.dumps({"seconds": seconds}))
    (folder / "settings.json").write_text(json.dumps({"starts": [start]} | keys))


def test_a_model_that_was_trained_elsewhere_is_that_of_one_seed(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    record_cell(out, "base__pi", 2)
    for seed in (0, 1):
        record_cell(out, f"grpo-pi-{seed}__pi", 5)
        record_run(out / f"grpo-pi-{seed}", 3600, gpus=0)
    record_run(elsewhere, 7200, gpus=8)
    done = call("--render-only", "--out", str(out), "--trained", f"pi={elsewhere}")
    assert done.returncode == 0, done.stderr
    summaries = [json.loads((out / "summaries" / f"grpo-pi-{seed}.json").read_text()) for seed in (0, 1)]
    assert [s["training"]["git_commit"] for s in summaries] == ["elsewhere", "grpo-pi-1"]
    assert [s["cost"]["gpu_seconds"] for s in summaries] == [8 * 7200, 0]
    assert read_rows(done.stdout, "Gain over the base model, and its cost")["pi"][3:5] == ["1.50", "8"]


def test_costs_of_a_column_have_one_unit(tmp_path: Path) -> None:
    for agent, gpus in (("codex", 8), ("pi", 0)):
        record_cell(tmp_path, f"base__{agent}", 2)
        record_cell(tmp_path, f"grpo-{agent}-0__{agent}", 5)
        record_run(tmp_path / f"grpo-{agent}-0", 3600, gpus=gpus)
    gains = read_rows("\n".join(render_report(report_of(tmp_path))), "Gain over the base model, and its cost")
    assert gains["agent"][4] == "GPU-hours"
    assert (gains["codex"][4:6], gains["pi"][4:6]) == (["8", "0.24"], ["0", "0"])


def test_cells_that_are_not_of_one_kind_are_named(tmp_path: Path) -> None:
    record_cell(tmp_path, "base__pi", 2)
    record_cell(tmp_path, "grpo-pi-0__pi", 5, temperature=0.6)
    record_cell(tmp_path, "grpo-pi-1__pi", 5, temperature=0.6)
    record_cell(tmp_path, "base__codex", 1, tasks="3 tasks bb")
    report = report_of(tmp_path)
    assert report["differences"] == [
        "base__pi and 2 more: tasks is '10 tasks aa', and '3 tasks bb' in base__codex",
        "grpo-pi-0__pi and 1 more: temperature is 0.6, and 1.0 in base__codex",
    ]
    assert "\n".join(render_report(report)).count("**Not one setting**") == 2


def test_what_is_compared_with_what(tmp_path: Path) -> None:
    """A model's settings across agents, an agent's across models, and all others across all cells."""
    for model in ("base", "grpo-pi-0"):
        for agent in ("codex", "pi"):
            record_cell(tmp_path, f"{model}__{agent}", 2, model=model, agent_version=agent, thinking=None)
    assert report_of(tmp_path)["differences"] == []
    path = tmp_path / "grpo-pi-0__pi" / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": "x", "agent_version": "2", "thinking": True}))
    assert report_of(tmp_path)["differences"] == [
        "grpo-pi-0__pi: model is 'x', and 'grpo-pi-0' in grpo-pi-0__codex",
        "grpo-pi-0__pi: agent_version is '2', and 'pi' in base__pi",
        "grpo-pi-0__pi: thinking is True, and None in base__codex",
    ]


def test_one_broken_cell_leaves_the_others_alone(tmp_path: Path) -> None:
    for agent in AGENTS:
        record_cell(tmp_path, f"base__{agent}", 2)
        record_cell(tmp_path, f"grpo-{agent}-0__{agent}", 5)
    (tmp_path / "base__codex" / "summary.json").write_text('{"model": ')
    (tmp_path / "base__claude_code" / "settings.json").write_text("[")
    (tmp_path / "grpo-qwen_code-0__qwen_code" / "results.jsonl").write_text("{}\n")
    path = tmp_path / "grpo-pi-0__pi" / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps(summary | {"pass_at": {"4": summary["pass_at"]["1"]}}))
    report = report_of(tmp_path)
    text = "\n".join(render_report(report))
    rows = {agent: cells[3:] for agent, cells in read_rows(text).items()}
    base, trained = "22.2 (6.3 to 54.7)", "55.6 (26.7 to 81.1)"
    assert rows["codex"] == ["unreadable", trained] and rows["claude_code"] == [base, trained]
    assert rows["qwen_code"] == [base, "unreadable"] and rows["pi"] == [base, "no pass@1"]
    assert not report["complete"]
    assert [line.split(": ")[0] for line in report["differences"]] == ["base__claude_code"]
    assert text.count(f"\nbase__codex: {tmp_path}/base__codex/summary.json: JSONDecodeError(") == 1
    assert f"{tmp_path}/grpo-qwen_code-0__qwen_code/results.jsonl, line 1" in text


def test_an_evaluation_that_lacks_sessions_and_a_run_without_a_start(tmp_path: Path) -> None:
    record_cell(tmp_path, "grpo-pi-0__pi", 2)
    record_run(tmp_path / "grpo-pi-0", 10, gpus=0, starts=[])
    path = tmp_path / "grpo-pi-0__pi" / "summary.json"
    summary = json.loads(path.read_text())
    assert report_of(tmp_path)["cells"]["grpo"]["pi"]["num_done"] == 1
    summary["sessions"]["missing"] = 1
    path.write_text(json.dumps(summary))
    assert report_of(tmp_path)["cells"]["grpo"]["pi"]["states"] == ["begun"]


# The driver, with a program in the place of the project's commands.


def test_the_picture_of_a_table_with_missing_cells(tmp_path: Path) -> None:
    for agent in ("codex", "pi"):
        record_cell(tmp_path, f"base__{agent}", 2)
    record_cell(tmp_path, "grpo-pi-0__pi", 4)
    report = build_report(build_summaries(tmp_path, find_models(tmp_path), find_agents(tmp_path)), seeds=[0, 1])
    draw_report(report, tmp_path / "pictures" / "table.png")
    assert (tmp_path / "pictures" / "table.png").read_bytes().startswith(b"\x89PNG")
    cells = report["cells"]
    assert [render_rate(cells[stage]["pi"]) for stage in ("base", "grpo")] == ["22", "44*"]


def test_the_commands_of_the_stages(tmp_path: Path) -> None:
    settings = Settings(out=tmp_path, agents=["pi"], seeds=[3], config="quickstart", base="m", tasks="t.jsonl")
    commands = {step.name: " ".join(step.command).split(" -m ")[1] for step in list_steps(settings)}
    assert commands["data-pi"] == (
        "polar_trl collect --config quickstart --agent pi --solutions true --test_share 0 --model_name_or_path m "
        f"--output_dir {tmp_path}/data-pi"
    )
    assert commands["sft-pi-3"] == (
        f"trl.scripts.sft --model_name_or_path m --seed 3 --dataset_name {tmp_path}/data-pi/dataset "
        "--dataset_config tokens --num_train_epochs 1 --per_device_train_batch_size 1 "
        "--gradient_accumulation_steps 4 --learning_rate 5e-5 "
        "--max_length 1024 --use_cpu true --bf16 false --gradient_checkpointing false "
        f"--report_to none --output_dir {tmp_path}/sft-pi-3"
    )
    assert commands["both-pi-3"] == (
        "polar_trl train quickstart --agent pi --seed 3 --resume_from_checkpoint auto "
        f"--model_name_or_path {tmp_path}/sft-pi-3 --output_dir {tmp_path}/both-pi-3"
    )
    assert commands["both-pi-3__pi"] == (
        f"polar_trl eval --config quickstart --agent pi --tasks t.jsonl --model_name_or_path {tmp_path}/both-pi-3 "
        f"--output_dir {tmp_path}/both-pi-3__pi"
    )


def test_the_commands_of_a_dry_run(tmp_path: Path) -> None:
    keys = ["--out", str(tmp_path / "o"), "--base", "Qwen/Qwen3.5-4B", "--trained", "codex=runs/codex", "pi=runs/pi"]
    keys += ["--config", "swe_8gpu", "--tasks", "swe-bench-verified", "--stages", "base", "grpo"]
    keys += ["--agents", "codex", "pi"]
    done = call(*keys, "--dry-run", "--", "--num_engines", "8")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert lines[0].split(" -m ")[1] == (
        "polar_trl eval --config swe_8gpu --agent codex --tasks swe-bench-verified "
        f"--model_name_or_path Qwen/Qwen3.5-4B --output_dir {tmp_path / 'o' / 'base__codex'} --num_engines 8"
    )
    done = call(*keys, "--dry-run", "--matrix")
    folders = [Path(line.split("--output_dir ")[1].split()[0]).name for line in done.stdout.splitlines()]
    assert folders == [
        *("base__codex", "base__pi", "grpo-codex-0__codex", "grpo-pi-0__pi", "grpo-codex-0__pi", "grpo-pi-0__codex"),
    ]
    assert not (tmp_path / "o").exists()


def test_the_documented_commands() -> None:
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("eval.md", "paper.md"))
    found = re.findall(r"^python scripts/reproduce_table\.py (.*)$", pages.replace("\\\n", " "), re.MULTILINE)
    assert len(found) >= 3
    for line in found:
        words = shlex.split(line)
        if "--render-only" in words:
            continue
        place = words.index("--") if "--" in words else len(words)
        done = call(*words[:place], "--dry-run", *words[place:])
        assert done.returncode == 0, done.stderr
        commands = done.stdout.splitlines()
        assert len(commands) >= 2
        evaluations = [command for command in commands if " polar_trl eval " in command]
        assert evaluations and all(command.endswith(shlex.join(words[place + 1 :])) for command in evaluations)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base", "m"], "give --out; --from goes with --render-only"),
        (["--out", "o", "--trained", "codex"], "'codex' is not AGENT=MODEL"),
        (["--out", "o", "--trained", "goose=m"], "--trained names 'goose', and the table has no stage grpo of it"),
        (["--out", "o", "--agents", "pi", "--stages", "base", "--trained", "pi=m"], "--trained names 'pi', and"),
        (["--out", "o", "--trained", "pi=a", "--trained", "pi=b"], "--trained names 'pi' twice"),
        (["--out", "o", "--base", "m", "--agents", "pi", "pi"], "--agents names 'pi' twice"),
        (["--out", "o", "--seeds", "1", "1"], "--seeds names 1 twice"),
        (["--render-only", "--out", "o", "--agents", "pi", "pi"], "--agents names 'pi' twice"),
        (["--out", "o", "--seeds=-1"], "'-1' is no seed, a whole number from 0"),
        (["--out", "o", "--jobs", "0"], "'0' is no number from 1"),
        (
            ["--render-only", "--out", "o", "--", "--limit", "3"],
            "what follows -- is for evaluations, and --render-only",
        ),
        (["--out", "o", "--stages", "rl"], "invalid choice: 'rl'"),
        (
            ["--out", "o", "--base", "m", "--config", "no/{agent}.yaml"],
            "--config for 'codex': no file at 'no/codex.yaml'",
        ),
        (["--render-only", "--out", "docs"], "docs is no folder of models and cells"),
        (["--render-only"], "--render-only takes --out, a folder of runs, or --from, a folder of summaries"),
    ],
)
def test_one_sentence(arguments: list[str], message: str) -> None:
    done = call(*arguments)
    assert done.returncode == 2
    assert message in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--out", "o", "--agents", "pi", "--config", "ladder_pi"],
            "ladder_pi has save_strategy: no, so that its runs leave no model to evaluate; give --train '--save_str",
        ),
        (
            ["--out", "o", "--agents", "pi", "--train=--save_strategy=no"],
            "--train=--save_strategy=no has save_strategy: no, so that its runs leave no model",
        ),
        (["--render-only", "--from", "docs"], "docs has no summaries of models, such as base.json"),
    ],
)
def test_what_a_file_says_wrong_is_one_sentence(arguments: list[str], message: str) -> None:
    done = call(*arguments)
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1].startswith(f"reproduce_table: {message}")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"evaluations": None}, "base.json is no summary of a model: TypeError("),
        ({"evaluations": {"pi": {"state": "done"}}}, "base.json is no summary of a model: KeyError("),
        ({"stage": "grpo", "agent": "pi"}, "base.json is the summary of grpo-pi-0; give it that name"),
    ],
)
def test_a_summary_that_cannot_be_used_is_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    record_cell(tmp_path, "base__pi", 2)
    (summary,) = build_summaries(tmp_path, find_models(tmp_path), find_agents(tmp_path))
    write_summaries(tmp_path, [summary])
    path = tmp_path / "summaries" / "base.json"
    assert load_summaries(path.parent) == [json.loads(path.read_text())]
    path.write_text(json.dumps(summary | changed))
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_summaries(path.parent)
