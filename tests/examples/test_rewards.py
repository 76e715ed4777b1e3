"""Test docs/rewards.md: its blocks are those of examples/rewards.py, which grade real sandboxes and train."""

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT, find_blocks
from reconstruct_sessions import build_rollout
from records import read_session

from polar_trl import FunctionGrader, Task
from polar_trl.errors import GradeError
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.types import Message, ToolCall

SOURCE = ROOT / "examples" / "rewards.py"
PRINTS = "print('pear')\n"


@pytest.fixture(scope="module")
def rewards() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("rewards_example", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grade(function: Callable[..., float], metadata: dict[str, Any], **files: str) -> float:
    """Grade a work folder with these files; a name's `_` is its dot."""
    task = Task(id="t", instruction="Sum it up.", metadata=metadata)
    backend = LocalSandboxBackend()
    sandbox = backend.create(task, "session")
    try:
        for name, text in files.items():
            sandbox.put(name.replace("_", "."), text.encode())
        return FunctionGrader(function).grade(task, sandbox, timeout_s=60).reward
    finally:
        sandbox.destroy()
        backend.close()


def test_the_page_shows_the_example() -> None:
    source = SOURCE.read_text()
    blocks = find_blocks(ROOT / "docs" / "rewards.md", "python")
    assert len(blocks) == 7
    for block in blocks:
        assert block in source, block


def test_calls_have_rewards_of_their_own(rewards: Any) -> None:
    function = rewards.grade_calls
    calls = build_rollout(([0], [100]), ([0, 100, 0], [101]), ([9], [102])).calls
    broken = ToolCall(id="a", name="bash", arguments="{", parse_status="malformed")
    calls = (calls[0], replace(calls[1], message=Message(role="assistant", tool_calls=(broken,))), calls[2])
    task = Task(id="t", instruction="x", metadata={"output": "pear"})
    backend = LocalSandboxBackend()
    sandbox = backend.create(task, "session")
    try:
        sandbox.put("main.py", PRINTS.encode())
        given = FunctionGrader(function).grade_session(task, sandbox, calls, timeout_s=60)
    finally:
        sandbox.destroy()
        backend.close()
    assert (given.reward, given.call_rewards) == (1.0, {1: -0.2})


def test_a_file_is_compared(rewards: Any) -> None:
    lines = {"lines": 3}
    assert grade(rewards.grade_report, lines, report_json='{"lines": 3}') == 1
    assert grade(rewards.grade_report, lines, report_json='{"lines": 4}') == 0
    assert grade(rewards.grade_report, lines, report_json="[3]") == 0
    assert grade(rewards.grade_report, lines, report_json="{") == 0
    assert grade(rewards.grade_report, lines) == 0


def test_a_program_is_run(rewards: Any) -> None:
    pear = {"output": "pear"}
    assert grade(rewards.grade_program, pear, main_py=PRINTS) == 1
    assert grade(rewards.grade_program, pear, main_py="print('fig')") == 0
    assert grade(rewards.grade_program, pear, main_py=f"{PRINTS}raise SystemExit(1)") == 0


def test_a_part_of_the_work_has_a_part_of_the_reward(rewards: Any) -> None:
    pear = {"output": "pear"}
    given = [grade(rewards.grade_steps, pear, **files) for files in ({}, {"main_py": "("}, {"main_py": "1"})]
    assert given == [0, pytest.approx(1 / 3), pytest.approx(2 / 3)]
    assert grade(rewards.grade_steps, pear, main_py=PRINTS) == 1


class _Judge(BaseHTTPRequestHandler):
    answer = "7"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert "Sum it up." in asked["messages"][0]["content"]
        body = json.dumps({"choices": [{"message": {"content": self.answer}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), _Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    yield server
    server.shutdown()
    server.server_close()


def test_a_judge_is_asked(rewards: Any, judge: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert grade(rewards.ask_judge, {}, summary_txt="All of it.") == pytest.approx(0.7)
    assert grade(rewards.ask_judge, {}) == 0
    monkeypatch.setattr(_Judge, "answer", "12")
    assert grade(rewards.ask_judge, {}, summary_txt="All of it.") == 1
    monkeypatch.setattr(_Judge, "answer", "rather good")
    with pytest.raises(GradeError, match="could not convert"):
        grade(rewards.ask_judge, {}, summary_txt="All of it.")


WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
from rewards import says_done, train
assert says_done([[{{"role": "assistant", "content": "Done."}}], [{{"role": "user", "content": "no"}}]]) == [1.0, 0.0]
train({model!r}, {reward_model!r}, output_dir={out!r}, max_steps=1, per_device_train_batch_size=4,
      gradient_accumulation_steps=2, num_generations=4, use_cpu=True, bf16=False, gradient_checkpointing=False,
      max_completion_length=16, vllm_max_model_length=512, max_session_calls=2, max_agents=4, save_strategy="no",
      report_to="none", logging_steps=1)
"""


def test_a_grader_a_function_and_a_reward_model_are_weighed(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config = AutoConfig.from_pretrained(tiny_model, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    out = tmp_path / "out"
    program = WORKER.format(model=str(tiny_model), reward_model=str(tmp_path / "judge"), out=str(out))
    done = subprocess.run(
        [sys.executable, "-c", program, str(SOURCE.parent)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(text) for text in (out / "log.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if "rewards/grader/mean" in line]
    grader, calls, model = (line[f"rewards/{name}/mean"] for name in ("grader", "few_calls", "judge"))
    assert line["reward"] == pytest.approx(grader + 0.1 * calls + 0.5 * model, abs=1e-4)
    sessions = [read_session(path) for path in out.glob("sessions/**/*.jsonl")]
    assert calls == pytest.approx(-sum(len(session.calls) for session in sessions) / 50 / len(sessions), abs=1e-4)
