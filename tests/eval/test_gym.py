"""NeMo Gym, both ways: our agent under its command line, and its rows and rewards in an evaluation of ours."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
from get_gym import read_requirement
from gym_servers import EXAMPLE, LOGPROB, Gym, find_rows, serve_scripted_vllm, start_gym

from polar_trl.cli import main
from polar_trl.eval.gym import _serve
from polar_trl.eval.sample_tasks import read_results
from polar_trl.reconstruct import build_prefix_merged, check_laws
from polar_trl.recording.log import read_record

REWARDS = [1.0, 1.0, 1.0, 0.0, 0.0]
"""Of the example rows, in order: the model below knows three answers."""
SHELL_AGENT = "python3 -I -S ~/shell_agent.py --max-turns 2 --shots 0 -- {instruction}"
"""Asks a second time where it is not told a command."""


def answer(conversation: str) -> str:
    rows = [json.loads(line) for line in find_rows().read_text().splitlines()]
    for row, reward in zip(rows, REWARDS, strict=True):
        if row["responses_create_params"]["input"][0]["content"] in conversation and reward:
            return f"\\boxed{{{row['expected_answer']}}}"
    return "I do not know."


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    with serve_scripted_vllm(answer) as url:
        yield url


@pytest.fixture(scope="module")
def gym(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gym]:
    settings = {"agent_command": SHELL_AGENT, "agent_files": ["polar_trl:agents/shell_agent.py"], "sandbox": "local"}
    with start_gym(tmp_path_factory.mktemp("gym") / "example", model, **settings) as started:
        yield started


@pytest.fixture(scope="module")
def rollouts(gym: Gym) -> list[dict[str, Any]]:
    """What Gym collected from our agent: of its example rows, and of one that we refuse."""
    function = {"type": "function", "name": "f", "parameters": {}, "strict": False}
    refused = {"responses_create_params": {"input": "hello", "tools": [function]}}
    rows = gym.folder / "rows.jsonl"
    rows.write_text(find_rows().read_text().rstrip("\n") + f"\n{json.dumps(refused)}\n")
    collect = ("eval", "run", "--no-serve", "+agent_name=polar_agent", "+output_jsonl_fpath=rollouts.jsonl")
    done = gym.run(*collect, f"+input_jsonl_fpath={rows}")
    log = (gym.folder / "gym.log").read_text()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + log[-3000:]
    lines = (gym.folder / "rollouts.jsonl").read_text().splitlines()
    return sorted(map(json.loads, lines), key=lambda rollout: rollout["_ng_task_index"])


def test_gym_gets_the_rewards_of_its_resources_server(gym: Gym, rollouts: list[dict[str, Any]]) -> None:
    assert [rollout["reward"] for rollout in rollouts] == REWARDS
    assert rollouts[0]["extracted_answer"] == rollouts[0]["expected_answer"]
    (aggregated,) = json.loads((gym.folder / "rollouts_aggregate_metrics.json").read_text())
    assert aggregated["key_metrics"]["pass@1/accuracy"] == pytest.approx(50.0)  # with the row that was refused


def test_gym_gets_the_ids_that_its_model_server_gave(rollouts: list[dict[str, Any]]) -> None:
    for rollout in rollouts:
        first, second = rollout["response"]["output"]
        text = second["content"][0]["text"]
        assert bytes(second["generation_token_ids"]) == text.encode() + b"\0"
        assert second["generation_log_probs"] == [LOGPROB] * len(second["generation_token_ids"])
        before = first["prompt_token_ids"] + first["generation_token_ids"]
        assert second["prompt_token_ids"][: len(before)] == before


def test_the_records_have_the_same_ids_and_keep_the_laws(gym: Gym, rollouts: list[dict[str, Any]]) -> None:
    records = [read_record(path) for path in (gym.folder / "runs" / "sessions").glob("*/*.jsonl")]
    assert len(records) == len(REWARDS)
    sampled = [call.completion.token_ids for record in records for call in record.rollout.calls]
    items = [item for rollout in rollouts for item in rollout["response"]["output"]]
    assert sorted(sampled) == sorted(tuple(item["generation_token_ids"]) for item in items)
    for record in records:
        reconstruction = build_prefix_merged(record.rollout)
        check_laws(record.rollout, reconstruction)
        assert len(reconstruction.trajectories) == 1


def test_a_row_that_no_agent_can_be_given_is_gyms_failure(gym: Gym, rollouts: list[dict[str, Any]]) -> None:
    (line,) = (gym.folder / "rollouts_failures.jsonl").read_text().splitlines()
    failed = json.loads(line)
    assert failed["_ng_failure_class"] == "row_refused"
    assert "functions of the resources server" in failed["error"]


def test_an_evaluation_has_gyms_rewards(gym: Gym, model: str, tmp_path: Path) -> None:
    words = ["--tasks", str(find_rows()), "--grader", gym.head, "--base_url", model, "--output_dir", str(tmp_path)]
    agent = EXAMPLE / "responses_api_agents" / "polar_agent" / "ask.py"
    words += ["--agent_command", "python3 -I -S ~/ask.py {instruction}", "--agent_files", str(agent)]
    assert main(["eval", *words, "--sandbox", "local"]) == 0
    results = sorted(read_results(tmp_path), key=lambda result: result.task)
    assert [result.task for result in results] == [f"example-{number}" for number in range(1, 6)]
    assert [result.reward for result in results] == REWARDS
    assert '"extracted_answer": null' in results[-1].detail


def test_a_row_needs_an_agent_or_one_server(gym: Gym, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "--tasks", str(find_rows()), "--output_dir", str(tmp_path / "out"), "--agent_command", "true"]
    words += ["--base_url", "http://127.0.0.1:9/v1", "--sandbox", "local"]
    assert main(words) == 2
    assert "give the address of Gym's head server as grader" in capsys.readouterr().err
    assert main([*words, "--grader", "http://127.0.0.1:9"]) == 2
    assert "no head server of NeMo Gym answers" in capsys.readouterr().err
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "a", "instruction": "Say hello."}\n')
    assert main([*words, "--grader", gym.head, "--tasks", str(tasks)]) == 2
    assert "'a' is no row of NeMo Gym" in capsys.readouterr().err


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\xff"])
def test_what_is_no_row_is_refused_and_ends_nothing(body: bytes) -> None:
    origins, is_over = Queue[str](), threading.Event()

    class Sessions:
        def run(self, row: dict[str, Any]) -> dict[str, Any]:
            return {**row, "reward": 1.0}

    with ThreadPoolExecutor(2) as pool:
        served = pool.submit(_serve, Sessions(), pool, origins.put, is_over.wait)  # type: ignore[arg-type]
        url = f"{origins.get(timeout=60)}/run"
        try:
            refused = httpx.post(url, content=body)
            assert (refused.status_code, refused.text) == (400, "a row is a JSON object")
            assert httpx.post(url, json={"a": 1}).json() == {"a": 1, "reward": 1.0}
        finally:
            is_over.set()
        served.result(timeout=60)


def test_the_agent_server_says_what_is_missing() -> None:
    app = EXAMPLE / "responses_api_agents" / "polar_agent" / "app.py"
    done = subprocess.run([sys.executable, str(app)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"pip install '{read_requirement()}'" in done.stderr
    assert (app.parent / "requirements.txt").read_text().strip() == read_requirement()


def test_the_command_needs_gyms_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gym", "--output_dir", str(tmp_path), "--agent_command", "true"]) == 2
    assert re.search("give Gym's model server as base_url, and its head server as grader", capsys.readouterr().err)
