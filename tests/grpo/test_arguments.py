"""A run file and flags are read alike, and what is wrong with them is one sentence."""

import os
from pathlib import Path
from typing import Any

import pytest

from polar_trl.errors import ConfigError
from polar_trl.eval.arguments import EvalArguments
from polar_trl.grpo.arguments import RunParser, parse_run

BASE = "use_cpu: true\nbf16: false\n"


def read(tmp_path: Path, text: str, *flags: str) -> dict[str, Any]:
    """All settings, by name."""
    path = tmp_path / "run.yaml"
    path.write_text(BASE + text)
    run, args, model = parse_run(RunParser(), [f"--config={path}", "--output_dir", str(tmp_path), *flags])
    return vars(run) | vars(args) | vars(model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate: fast", "learning_rate is 'fast'; give a number"),
        ("learning_rate:", "learning_rate has no value; give a number, or leave it out"),
        ("max_agents: 2.5", "max_agents is '2.5'; give a whole number"),
        ("max_agents: [3]", "max_agents is [3]; give a whole number"),
        ("max_agents: true", "max_agents is True; give a whole number"),
        ("bf16: perhaps", "bf16 is 'perhaps'; give true or false"),
        ("thinking: kep", "thinking is 'kep'; give one of keep, template"),
        ("save_strategy: no", "save_strategy is False; give one of no, steps, epoch, best, in quotes"),
        ("agent_command: true", "agent_command is True; give text, in quotes"),
        ("reward_weights: [1, much]", "reward_weights is 'much'; give a number"),
        (
            "lerning_rate: 1\nmax_agent: 3",
            "nothing reads lerning_rate, max_agent. Did you mean 'learning_rate', 'max_",
        ),
        ("task: x", "nothing reads task. Did you mean 'tasks'?"),
        ("xyzzy: 1", "nothing reads xyzzy; leave it out"),
    ],
)
def test_a_wrong_key_or_value_of_the_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'run.yaml'}: {message}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learning_rate", "fast"], "learning_rate is 'fast'; give a number"),
        (["--learning-rate"], "--learning_rate/--learning-rate: expected one argument"),
        (["--thinking", "kep"], "thinking is 'kep'; give one of keep, template"),
        (
            ["--lerning-rate=1", "--xyzzy"],
            "flags: nothing reads --lerning-rate, --xyzzy. Did you mean 'learning_rate'?",
        ),
        (["--max_agent", "3"], "flags: nothing reads --max_agent. Did you mean 'max_agents'?"),
        (["7"], "flags: nothing reads 7; leave it out"),
        (["--model_init_kwargs", "{bad"], "a setting is '{bad', and that is no JSON: Expecting property name"),
        (["--accelerator_config", "no.json"], "no.json, which a setting names, cannot be read (No such file or"),
        (["--config"], "--config names no file; give a run file"),
        (["--config", "no.yaml"], "--config no.yaml cannot be read (No such file or directory); give a run file"),
    ],
)
def test_a_wrong_flag(tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "tasks: x", *flags)
    assert str(caught.value).startswith(message)


def test_a_missing_key() -> None:
    with pytest.raises(ConfigError, match=r"^tasks is needed, in the run file \(--config\) or as a flag$"):
        parse_run(RunParser(), ["--use_cpu", "--bf16", "false"])


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a: [1\nb: : 2", "is no YAML: while parsing"), (b"\xff", "is no YAML: "), (b"[1]", "must be a mapping")],
)
def test_a_file_that_is_no_run_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        parse_run(RunParser(), ["--config", str(tmp_path / "run.yaml")])
    assert "\n" not in str(caught.value)


def test_values_of_the_file_are_those_of_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLAR_TEST", raising=False)
    text = (
        "tasks: x\nenv: {POLAR_TEST: 3}\nlearning_rate: 1e-5\nmax_steps: 3\nagent_files: a.py\nsandbox_cpus: 2\n"
        "lora_target_modules: all-linear\nmodel_init_kwargs: {dtype: auto}\nreport_to: [none]\nsandbox_image:\n"
    )
    settings = read(tmp_path, text, "--max_steps", "4")
    names = ("learning_rate", "max_steps", "agent_files", "sandbox_cpus", "lora_target_modules", "sandbox_image")
    assert [settings[name] for name in names] == [1e-5, 4, ["a.py"], 2, "all-linear", None]
    assert settings["model_init_kwargs"] == {"dtype": "auto"}
    assert os.environ.pop("POLAR_TEST") == "3"


def test_help_is_that_of_argparse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_run(RunParser(EvalArguments), ["--help"])
    assert ended.value.code == 0 and "--num_samples" in capsys.readouterr().out
