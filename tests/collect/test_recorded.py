"""Sessions of a training or an evaluation are collected by their rewards, and those of `polar-trl serve` by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from collect_sessions import Recorder, record_folder
from datasets import load_dataset
from tiny_qwen import build_tiny_qwen3

from polar_trl.cli import main
from polar_trl.collect.data_set import Report, Selection
from polar_trl.collect.run import collect_recorded
from polar_trl.errors import ConfigError, PolarError


@pytest.fixture(scope="module")
def recorder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    model = build_tiny_qwen3(smollm2, tmp_path_factory.mktemp("model"))
    return record_folder(model, tmp_path_factory.mktemp("out"))


@pytest.fixture
def trained(recorder: Recorder, tmp_path: Path) -> Path:
    """As a training leaves it: no results.jsonl, and the tasks of alpha are those that it evaluates on."""
    folder = tmp_path / "run"
    for result in recorder.results:
        batch = "eval_00001" if result.repo == "alpha" else "train_00002"
        target = folder / "sessions" / "start" / batch / f"{result.rollout}.jsonl"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(recorder.folder / result.record, target)
    write_settings(folder, model="/home/me/models/tiny", agent="pi")
    (folder / "trained.jsonl").touch()
    return folder


def write_settings(folder: Path, **settings: Any) -> None:
    (folder / "settings.json").write_text(json.dumps(settings))


def collect(recorded: Path, out: Path, *names: str, **selection: Any) -> tuple[Report, list[dict[str, Any]]]:
    report = collect_recorded(recorded, out, Selection(test_share=0.0, **selection), names)
    return report, list(load_dataset(str(out / "dataset"), "tokens", split="train", cache_dir=str(out / "cache")))


def test_a_training_gives_what_passed_and_not_its_evaluations(trained: Path, tmp_path: Path) -> None:
    report, rows = collect(trained, tmp_path / "out")
    assert (report.total.attempts, report.total.accepted, report.is_graded) == (12, 11, True)
    assert {row["reward"] for row in rows} == {1.0} and len(rows) == 11
    assert all("/train_00002/b" in row["session"] and row["agent"] == "pi" for row in rows)
    card = (tmp_path / "out" / "dataset" / "README.md").read_text()
    assert "11 of 12 graded sessions were accepted" in card and "Sessions of pi with tiny" in card
    report, rows = collect(trained, tmp_path / "out", "b1", min_reward=0.4)
    assert sorted(row["reward"] for row in rows) == [0.4, 1.0]


def test_nothing_that_passed_is_no_data_set(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(PolarError, match=r"none of 12 graded sessions in .* has a reward of 2 or more"):
        collect(trained, tmp_path / "out", min_reward=2.0)
    with pytest.raises(ConfigError, match="has no finished session 'a1' with an answer; it has b0, b1"):
        collect(trained, tmp_path / "out", "a1")


def test_an_evaluation_gives_what_its_results_say(recorder: Recorder, tmp_path: Path) -> None:
    folder = tmp_path / "eval"
    shutil.copytree(recorder.folder, folder)
    write_settings(folder, tokenizer="/home/me/models/tiny", agent="pi")
    report, rows = collect(folder, tmp_path / "out")
    accepted = {result.record for result in recorder.results if result.reward == 1.0}
    assert {row["session"] for row in rows} == accepted and report.total.failed == 1
    assert {row["repo"] for row in rows} == {"alpha", "beta"}


@pytest.mark.parametrize(
    ("settings", "title"),
    [
        ({"engine": "solutions", "served_name": None}, "the tasks' solutions, spelled by tiny"),
        ({"engine": "server", "served_name": "org/strong"}, "strong"),
        ({"engine": "vllm", "served_name": None}, "tiny"),
    ],
)
def test_the_card_says_what_answered(recorder: Recorder, tmp_path: Path, settings: dict[str, Any], title: str) -> None:
    """Not whose tokens they are: a program that knows the solutions is not the model."""
    folder = tmp_path / "eval"
    shutil.copytree(recorder.folder, folder)
    write_settings(folder, tokenizer="/home/me/models/tiny", model="tiny 0123", agent="pi", **settings)
    collect_recorded(folder, tmp_path / "out", Selection(test_share=0.0), [])
    assert f"# Sessions of pi with {title}\n" in (tmp_path / "out" / "dataset" / "README.md").read_text()


def test_sessions_of_serve_are_accepted_by_name(
    recorder: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "serve"
    shutil.copytree(recorder.folder / "sessions", folder / "sessions")
    write_settings(folder, command="serve", model="tiny 0123", tokenizer="/home/me/models/tiny", agent=None)
    report, rows = collect(folder, tmp_path / "out", "b2", "b3")
    assert report.total.accepted == len(rows) == 2 and not report.is_graded
    card = (tmp_path / "out" / "dataset" / "README.md").read_text()
    assert "2 sessions chosen by name. None was graded" in card
    assert "min_reward" not in card and "rate %" not in card
    words = ["collect", "--recorded", str(folder), "--output_dir", str(tmp_path / "out"), "--sessions", "b2", "b3"]
    assert main([*words, "--test_share", "0"]) == 0
    printed = capsys.readouterr().out
    assert "2 sessions chosen by name, none graded: 2 rows to train, 0 to test" in printed and "rate" not in printed
