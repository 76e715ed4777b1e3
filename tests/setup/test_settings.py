"""Test `--help`, `--help-all` and docs/settings.md, which are made from the help texts of the settings."""

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from launch import find_warm_python

from polar_trl.grpo.arguments import RunParser
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.setup.run_setup import RunArguments
from polar_trl.setup.settings import format_page, format_short_help, list_groups

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_settings_say() -> None:
    page = ROOT / "docs" / "settings.md"
    assert page.read_text(encoding="utf-8") == format_page(RunArguments, PolarGRPOConfig), (
        "run scripts/dev/settings_page.py"
    )


def test_every_setting_of_ours_is_listed_once_and_says_what_it_does() -> None:
    listed = [setting for settings in list_groups(RunArguments, PolarGRPOConfig).values() for setting in settings]
    names = [setting.name for setting in listed]
    assert len(names) == len(set(names)) and {"tasks", "max_agents", "sequence_layout"} <= set(names)
    assert "per_device_train_batch_size" not in names  # TRL's
    assert [setting.name for setting in listed if not setting.help] == []


def test_a_setting_without_a_group_is_shown_under_more() -> None:
    @dataclass
    class More(RunArguments):
        new_key: int | None = field(default=7, metadata={"help": "A <new> key. It is | new."})

    More.__module__ = "polar_trl.somewhere"
    assert [setting.name for setting in list_groups(More)["More"]] == ["new_key"]
    assert "| `new_key` | `7` | A \\<new> key. It is \\| new. |" in format_page(More)


def test_the_short_help_fits_on_a_screen_or_two_and_the_long_one_has_everything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            RunParser(prog="polar-trl train").parse_args_into_dataclasses([flag])
        assert ended.value.code == 0
    short, _, long = capsys.readouterr().out.partition("--help-all lists")
    lines = short.splitlines()
    assert len(lines) < 100 and max(map(len, lines)) <= 120
    assert "  --max_agents" in short and "--reward_funcs" in short and "adam_beta1" not in short
    assert "--adam_beta1" in long and "--max_agents" in long


def test_the_command_prints_it() -> None:
    command = [find_warm_python(), "-m", "polar_trl", "train", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "Tasks and rewards:" in done.stdout, done.stderr


def test_help_is_a_line_for_each_setting() -> None:
    from trl import ModelConfig

    text = format_short_help("train", RunArguments, PolarGRPOConfig, ModelConfig)
    assert [line for line in text.splitlines() if line.startswith("  --sandbox_cpus ")] == [
        "  --sandbox_cpus                  Cores of one sandbox [2.0]"
    ]
