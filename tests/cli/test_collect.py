"""`polar-trl collect` with an engine of its own: the first command of docs/collect.md, and bad input."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset
from launch import find_warm_python
from openai_servers import serve_app
from records import read_session
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from polar_trl.cli import main
from polar_trl.collect.data_set import Selection
from polar_trl.collect.run import parse_collection
from polar_trl.eval.sample_tasks import read_results
from polar_trl.eval.setup import parse_eval
from polar_trl.reconstruct import build_prefix_merged

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ("--config", str(ROOT / "polar_trl" / "configs" / "quickstart.yaml"))


def run_documented(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The command of the docs, on fewer tasks and with another folder."""
    text = (ROOT / "docs" / "collect.md").read_text(encoding="utf-8")
    command = re.findall(r"^polar-trl collect .*", text, re.MULTILINE)[0]
    for before, after in (("--limit 8", "--limit 3"), ("runs/collect", shlex.quote(str(out)))):
        assert command.count(before) == 1
        command = command.replace(before, after)
    words = [find_warm_python(), "-m", "polar_trl", *shlex.split(command)[1:], *more]
    return subprocess.run(words, capture_output=True, text=True, timeout=600, cwd=ROOT)


def read_files(folder: Path) -> dict[str, bytes]:
    """All of a run but the process that wrote it."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "owner.lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_the_documented_command(tmp_path: Path) -> None:
    out = tmp_path / "out"
    # the ladder's grader gives partial credit for being near: what is collected does not hang on luck
    done = run_documented(out, "--min_reward", "0.01")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "safetensors" not in done.stderr and "safetensors" in (out / "libraries.log").read_text()
    results = read_results(out)
    accepted = [result for result in results if (result.reward or 0.0) >= 0.01]
    assert len(results) == 12
    assert accepted
    total = re.search(r"total\s*│([^\n]*)│", done.stdout)
    assert total is not None
    cells = [cell.strip() for cell in total[1].split("│")]
    assert cells[:5] == ["3", "12", str(len(accepted)), f"{100 * len(accepted) / 12:.1f}", "0"]
    assert f'load_dataset("{out / "dataset"}", "tokens")' in done.stdout

    rows = load_dataset(str(out / "dataset"), "tokens", split="train", cache_dir=str(tmp_path / "cache"))
    expected = {
        (result.record, trajectory.token_ids, trajectory.trainable)
        for result in accepted
        for trajectory in build_prefix_merged(read_session(out / result.record)).trajectories
    }
    assert {
        (row["session"], tuple(row["input_ids"]), tuple(map(bool, row["assistant_masks"]))) for row in rows
    } == expected

    before = read_files(out)
    again = run_documented(out, "--min_reward", "0.01", "--json")
    assert again.returncode == 0, again.stderr[-3000:]
    assert json.loads(again.stdout)["total"]["attempts"] == 12
    assert read_files(out) == before  # nothing was run again, and the same bytes came of it

    nothing = run_documented(out, "--min_reward", "2")
    assert nothing.returncode == 1
    sentence = nothing.stderr.strip().splitlines()[-1]
    assert sentence.startswith("polar-trl: none of 12 graded sessions in ")
    assert sentence.endswith("no data set was written")
    assert read_files(out) == before


def collect(capfd: pytest.CaptureFixture[str], out: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and the last line on standard error."""
    status = main(["collect", "--output_dir", str(out), *arguments])
    return status, capfd.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--test_share", "1.5"), "test_share is 1.5; give a share from 0 to below 1, such as 0.1"),
        (("--text_only",), "text_only is about a server; give its base_url"),
        (("--served_name", "x"), "served_name is about a server"),
        (("--num_smaples", "3"), "Did you mean 'num_samples'?"),
        (("--base_url", "http://127.0.0.1:9/v1"), "no model is served at http://127.0.0.1:9/v1: "),
        (("--base_url", "127.0.0.1:9"), "'127.0.0.1:9' is no address of a server"),
        (("--model_name_or_path", "no/such/model"), "no/such/model"),
    ],
)
def test_one_sentence(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(ROOT)
    status, said = collect(capfd, tmp_path / "out", *CONFIG, "--limit", "1", *arguments)
    assert status == 2
    assert said.startswith("polar-trl: ")
    assert message in said
    assert not (tmp_path / "out" / "dataset").exists()


def test_something_else_in_the_way_is_said_before_anything_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "dataset").mkdir()
    (tmp_path / "settings.json").touch()
    status, said = collect(capfd, tmp_path, *CONFIG, "--base_url", "http://127.0.0.1:9/v1")
    assert (status, said.endswith("of polar-trl collect; name another output_dir")) == (2, True)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (None, "/v1/models refuses the request (status 404)"),
        ([{"id": "a", "max_model_len": 64}, {"id": "b"}], "serves a, b: name one of them (served_name)"),
        ([{"id": "a"}], "does not say how long a context of a may be; give vllm_max_model_length"),
    ],
)
def test_servers_that_cannot_be_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, models: Any, message: str
) -> None:
    async def listing(request: Request) -> Response:
        return JSONResponse({"data": models})

    monkeypatch.chdir(ROOT)
    config = tmp_path / "run.yaml"
    text = (ROOT / "polar_trl" / "configs" / "quickstart.yaml").read_text()
    config.write_text(text.replace("vllm_max_model_length: 1024\n", ""))
    with serve_app({"/v1/models": listing} if models is not None else {}) as url:
        status, said = collect(
            capfd, tmp_path / "out", "--config", str(config), "--limit", "1", "--base_url", f"{url}/v1"
        )
    assert status == 2
    assert message in said


def test_a_server_with_another_tokenizer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def listing(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "a", "max_model_len": 64}]})

    async def completions(request: Request) -> Response:
        prompt = (await request.json())["prompt"]
        ids = prompt if isinstance(prompt, list) else [5, 6, 7]
        logprobs = {"token_logprobs": [-0.5], "tokens": ["token_id:7"]}
        choice = {"token_ids": [7], "prompt_token_ids": ids, "logprobs": logprobs, "finish_reason": "length"}
        return JSONResponse({"choices": [choice]})

    monkeypatch.chdir(ROOT)
    with serve_app({"/v1/models": listing, "/v1/completions": completions}) as url:
        status, said = collect(capfd, tmp_path / "out", *CONFIG, "--limit", "1", "--base_url", f"{url}/v1")
    assert status == 2
    assert "has another tokenizer than model_name_or_path" in said
    assert not (tmp_path / "out" / "results.jsonl").exists()


def test_help_has_examples_and_loads_nothing_heavy() -> None:
    code = "import sys, polar_trl.cli as c\ntry: c.main(['collect', '--help'])\nfinally: print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    text, modules = done.stdout.rsplit("\n", 2)[0], done.stdout.strip().splitlines()[-1]
    assert "polar-trl collect --config quickstart --num_samples 4 --output_dir runs/collect" in text
    assert not {"torch", "trl", "vllm", "transformers", "datasets"} & set(json.loads(modules.replace("'", '"')))


@pytest.mark.parametrize("evals", ["evals.jsonl", '{"easy": "a.jsonl", "hard": "b.jsonl"}'])
def test_engines_take_the_tasks_that_are_collected(tmp_path: Path, evals: str) -> None:
    """They are processes of `polar-trl eval`, which prefers eval_tasks, and would have to be told which of several."""
    tasks = ROOT / "polar_trl" / "configs" / "tasks" / "shell_ladder.jsonl"
    keys = ["--tasks", str(tasks), "--eval_tasks", evals, "--agent_command", "true"]
    collection = parse_collection(ROOT / "polar_trl" / "configs" / "quickstart.yaml", keys, tmp_path, Selection())
    worker = parse_eval(None, collection.setup.command[2:], tmp_path)
    assert (collection.setup.tasks, worker.tasks) == (str(tasks), str(tasks))
    assert collection.selection.num_samples == 1
