"""A run file and flags are read alike, and what is wrong with them is one sentence."""

import os
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from polar_trl.errors import ConfigError
from polar_trl.eval.arguments import EvalArguments
from polar_trl.grpo.arguments import RunParser, parse_groups, parse_run
from polar_trl.grpo.trl_arguments.script import load_script_sets
from polar_trl.setup.run_setup import RunArguments, limit_times, require_tasks
from polar_trl.types import Task

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
        (["--config", "no.yaml"], "--config: no file at 'no.yaml', and no run file of that"),
    ],
)
def test_a_wrong_flag(tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "tasks: x", *flags)
    assert str(caught.value).startswith(message)


def test_tasks_are_needed_where_no_data_set_is_named() -> None:
    run, _, _ = parse_run(RunParser(), ["--use_cpu", "--bf16", "false"])
    with pytest.raises(ConfigError, match=r"^tasks is needed, in the run file \(--config\) or as a flag"):
        require_tasks(run)


def test_keys_of_trls_script(tmp_path: Path) -> None:
    flags = ["--dataset_name", "d", "--reward_funcs", "a.b", "accuracy_reward", "--dtype", "bfloat16"]
    _, args, _, script = parse_groups(RunParser(), ["--use_cpu", "--bf16", "false", *flags])
    assert (script.dataset_name, script.dataset_train_split) == ("d", "train")
    assert script.reward_funcs == ["a.b", "accuracy_reward"] and args.model_init_kwargs == {"dtype": "bfloat16"}
    for flag, message in (
        (["--dataset_streaming"], "dataset_streaming must be false: a run must know its tasks before it starts"),
        (["--load_in_4bit"], "load_in_4bit must be false: quantized weights cannot be trained here"),
        (["--attn_implementation", "sdpa"], "attn_implementation 'sdpa' would not be used"),
        (["--datasets_name", "d"], "nothing reads --datasets_name. Did you mean 'dataset_name'"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_groups(RunParser(), ["--use_cpu", "--bf16", "false", *flag])


def test_time_limits_are_for_tasks_that_do_not_say() -> None:
    run = RunArguments(agent_timeout_s=30.0, grade_timeout_s=5.0)
    plain, own = limit_times(run, [Task(id="a", instruction="x"), Task(id="b", instruction="x", agent_timeout_s=9.0)])
    assert (plain.agent_timeout_s, plain.grade_timeout_s, plain.prepare_timeout_s) == (30.0, 5.0, 120.0)
    assert (own.agent_timeout_s, own.grade_timeout_s) == (9.0, 5.0)
    with pytest.raises(ConfigError, match=r"prepare_timeout_s must be above 0 \(it is 0\.0\)"):
        limit_times(RunArguments(prepare_timeout_s=0.0), [plain])


def load_sets(*flags: str) -> tuple[list[Task], list[Task]]:
    run, args, _, script = parse_groups(RunParser(), ["--use_cpu", "--bf16", "false", *flags])
    return load_script_sets(script, run, args)


def test_a_data_set_by_name_is_a_folder_a_file_or_one_that_was_saved(tmp_path: Path) -> None:
    for split in ("train", "test"):
        rows = "".join(f'{{"prompt": "{split} {i}", "n": {i}}}\n' for i in range(2))
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / f"{split}.jsonl").write_text(rows)
    train, evals = load_sets("--dataset_name", str(tmp_path / "folder"))
    assert [task.instruction for task in train] == ["train 0", "train 1"] and evals == []
    more = ("--dataset_train_split", "test", "--dataset_test_split", "train", "--eval_strategy", "steps")
    train, evals = load_sets("--dataset_name", str(tmp_path / "folder"), *more)
    assert [task.metadata["n"] for task in train] == [0, 1] and evals[0].instruction == "train 0"
    assert len(load_sets("--dataset_name", str(tmp_path / "folder" / "train.jsonl"))[0]) == 2
    Dataset.from_list([{"prompt": "x"}]).save_to_disk(tmp_path / "saved")
    assert load_sets("--dataset_name", str(tmp_path / "saved"))[0][0].instruction == "x"
    assert load_sets() == ([], [])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--dataset_name", "nobody/nothing"],
            "dataset_name 'nobody/nothing' cannot be loaded: give a folder or file",
        ),
        (
            ["--dataset_name", "FILE", "--dataset_train_split", "dev"],
            "dataset_train_split is 'dev', and .* splits",
        ),
        (["--dataset_name", "FILE", "--tasks", "x"], "tasks is 'x' and dataset_name is .*: give one of them"),
    ],
)
def test_a_data_set_that_cannot_be_loaded(tmp_path: Path, flags: list[str], message: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(ConfigError, match=message) as caught:
        load_sets(*[str(tmp_path / "rows.jsonl") if flag == "FILE" else flag for flag in flags])
    assert "\n" not in str(caught.value)


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
