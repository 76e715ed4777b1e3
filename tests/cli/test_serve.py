"""`polar-trl serve` as a process: vLLM's CPU build, a real model, the providers' clients, a real agent, Ctrl-C."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from datasets import load_dataset
from openai_servers import serve_app
from peft import LoraConfig, get_peft_model
from sdks import SDKS
from serving import CHAT, HELLO, wait_until
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from transformers import AutoModelForCausalLM

from polar_trl.cli import main
from polar_trl.harness.install import NODE
from polar_trl.harness.pi import PiHarness
from polar_trl.recording.log import SessionRecord, read_record
from polar_trl.tools.inspector.run_folder import RunFolder
from polar_trl.types import Endpoint

ROOT = Path(__file__).resolve().parents[2]
HEARING = ["env", "--default-signal=HUP"]
"""A test run that was started by nohup ignores the end of its terminal, and so would what it starts."""
SERVE = [*HEARING, sys.executable, "-m", "polar_trl", "serve"]
KEY = "polar-a-key-of-mine"


@dataclass
class Served:
    """A server that has started, on a terminal."""

    process: "subprocess.Popen[str]"
    out: Path
    printed: str
    origin: str
    terminal: int
    said: list[bytes] = field(default_factory=list)
    """What the terminal has shown."""

    def endpoint(self, name: str = "") -> Endpoint:
        return Endpoint(origin=self.origin, api_key=KEY + (f".{name}" if name else ""), model="policy")

    def read(self, name: str) -> SessionRecord:
        (path,) = (self.out / "sessions").glob(f"*/{name}.jsonl")
        return read_record(path)

    def hang_up(self) -> None:
        """Close the terminal."""
        os.close(self.terminal)

    @property
    def shown(self) -> str:
        return b"".join(self.said).decode(errors="replace")


def start(model: Path | None, out: Path, *keys: str) -> Served:
    """Start it with its standard error on a terminal, and wait for what it prints."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*SERVE, *([str(model)] if model else []), "--output_dir", str(out), "--port", "0", "--key", KEY, *keys],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(theirs)
    served = Served(process, out, "", "", ours)

    def listen() -> None:
        try:
            while block := os.read(ours, 4096):
                served.said.append(block)
        except OSError:  # one end is closed
            pass

    threading.Thread(target=listen, daemon=True).start()
    assert process.stdout is not None
    for line in process.stdout:
        served.printed += line
        if "Ctrl-C ends it" in line:
            break
    found = re.search(r"served at (http://127\.0\.0\.1:\d+) ", served.printed)
    assert found is not None, served.shown[-3000:]
    served.origin = found[1]
    return served


@pytest.fixture(scope="module")
def served(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A small real model, as it samples at temperature 0."""
    served = start(smollm2, tmp_path_factory.mktemp("serve") / "out", "--eval_temperature", "0.0")
    yield served
    served.process.kill()
    served.process.wait()


@pytest.mark.parametrize("dialect", SDKS)
def test_the_providers_clients_read_it_as_it_comes(served: Served, dialect: str) -> None:
    asked = SDKS[dialect](served.endpoint(dialect), text="Write two sentences about the sea.")
    streamed = asked.ask(stream=True, max_tokens=60)
    whole = SDKS[dialect](served.endpoint(f"{dialect}-whole"), text="Write two sentences about the sea.")
    assert streamed.text and streamed.text == whole.ask(max_tokens=60).text
    asked.say("And one more.")
    assert asked.ask(stream=True, max_tokens=20).num_sampled_tokens > 0
    one, two = served.read(dialect).rollout.calls
    # streamed or not, the ids of one greedy question are the same, and the next prompt begins with them
    assert one.completion.token_ids == served.read(f"{dialect}-whole").rollout.calls[0].completion.token_ids
    known = one.prompt_ids + one.completion.token_ids
    assert two.prompt_ids[: len(known)] == known and two.parent == 0


def test_text_comes_in_many_parts(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "Count to one hundred."}], "stream": True, "max_tokens": 80}
    headers = {"authorization": f"Bearer {KEY}.parts"}
    with httpx.stream("POST", served.origin + CHAT, json=body, headers=headers, timeout=600) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    texts = [text for event in events if (text := event["choices"][0]["delta"].get("content"))]
    assert len(texts) > 8 and len("".join(texts)) > 80


def test_what_libraries_print_is_in_a_file(served: Served) -> None:
    assert not re.search("[Ww]arning|WARNING|safetensors|Ignoring", served.shown), served.shown
    assert "safetensors" in (served.out / "libraries.log").read_text()


def test_a_client_that_hangs_up_frees_the_engine(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "Count to ten thousand."}], "stream": True, "max_tokens": 4000}
    headers = {"authorization": f"Bearer {KEY}.hangs-up"}
    with httpx.stream("POST", served.origin + CHAT, json=body, headers=headers, timeout=600) as response:
        next(response.iter_lines())
    # an engine that went on would take minutes
    assert SDKS["openai_chat"](served.endpoint("after")).ask(max_tokens=2).num_sampled_tokens > 0


def test_pi_answers_from_what_was_printed(served: Served, tmp_path: Path) -> None:
    harness = PiHarness()
    harness.install()
    command = served.printed.split("\nPi\n    ")[1].splitlines()[0]
    program = f"{harness.folders[-1]}/node_modules/.bin"
    done = subprocess.run(
        ["bash", "-c", f"{command.replace(KEY, f'{KEY}.pi')} -p 'Say hello.'"],
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": f"{program}:{NODE.program.parent}:/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr[-2000:]


@pytest.mark.parametrize("key", ["", "polar", f"{KEY}.", f"{KEY}./etc", f"{KEY}.default", f"{KEY}.{'x' * 65}", "x.y"])
def test_other_keys_are_unknown(served: Served, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = httpx.post(served.origin + CHAT, json={"messages": HELLO}, headers=headers, timeout=600)
    assert answer.status_code == 401


def test_a_second_one_says_what_is_taken(
    served: Served, smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = served.origin.rpartition(":")[2]
    assert main(["serve", str(smollm2), "--port", port, "--output_dir", str(tmp_path / "other")]) == 2
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert main(["serve", str(smollm2), "--port", "0", "--output_dir", str(served.out)]) == 2
    said = capsys.readouterr().err
    assert f"(process {served.process.pid} on " in said and "serve " in said, said


def test_the_banner_says_how_long_an_answer_may_be(served: Served) -> None:
    assert re.search(r"have \d+ tokens, an answer at most \d+ \(max_completion_length\)\n", served.printed)


def test_it_can_be_looked_at_while_it_serves(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SDKS["openai_chat"](served.endpoint("seen")).ask(max_tokens=2)
    folder = RunFolder(served.out)
    rows = {row["rollout"]: row for row in folder.build_table()}
    assert rows["seen"]["calls"] == 1 and folder.is_live() and folder.vocabulary.is_known
    collect = ["collect", "--recorded", str(served.out), "--output_dir", str(tmp_path)]
    for words, wanted in (([], "session"), (["--sessions", "seen"], "session 'seen'")):
        assert main([*collect, *words]) == 2
        said = capsys.readouterr().err
        assert f"has no finished {wanted} with an answer; it has none; " in said
        assert f"{len(rows)} without an end: end `polar-trl serve` first if it runs" in said


def test_ctrl_c_ends_it_and_what_it_recorded_is_read(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("", "kept", "kept-too"):
        SDKS["openai_chat"](served.endpoint(name)).ask(max_tokens=2)
    line = re.compile(r"(\d+) sessions, (\d+) calls, ([\d,]+) tokens, [\d.]+ tokens/s in the last")
    wait_until(lambda: line.search(served.shown) is not None)
    body = {"messages": [{"role": "user", "content": "Count to ten thousand."}], "stream": True, "max_tokens": 4000}
    headers = {"authorization": f"Bearer {KEY}.cut"}
    with httpx.stream("POST", served.origin + CHAT, json=body, headers=headers, timeout=600) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(served.process.pid, signal.SIGINT)
        assert "this session has ended" in list(lines)[-2]
    assert served.process.wait(timeout=600) == 0
    assert f"polar-trl inspect {served.out}" in served.shown
    records = {path.stem: read_record(path) for path in (served.out / "sessions").rglob("*.jsonl")}
    assert {"default", "kept", "kept-too", "cut"} <= records.keys()
    assert all(record.finished for record in records.values())
    assert records["cut"].rollout.stop_reason == "no_calls"
    assert records["cut"].rollout.counters == {"calls_aborted": 1}

    assert main(["replay", "--json", str(served.out)]) == 0
    totals = json.loads(capsys.readouterr().out)
    assert totals["sessions"] == totals["digests_compared"] == len(records)
    assert totals["unfinished"] == totals["digest_mismatches"] == totals["broken_laws"] == 0
    folder = RunFolder(served.out)
    (row,) = [row for row in folder.build_table() if row["rollout"] == "kept"]
    assert folder.build_session(row["key"])["row"]["calls"] == 1 and not folder.is_live()
    check_collecting(served.out, tmp_path / "data", records, capsys)


def check_collecting(
    out: Path, data: Path, records: dict[str, SessionRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    """All sessions with an answer, or those that are named, become a data set of the ids that were sampled."""
    answered = [name for name, record in records.items() if record.rollout.calls]
    collect = ["collect", "--recorded", str(out), "--output_dir", str(data), "--json"]
    assert main(collect) == 0
    assert json.loads(capsys.readouterr().out)["total"]["accepted"] == len(answered)
    assert main([*collect, "--sessions", "kept", "kept-too"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["total"]["accepted"] == 2 and not report["is_graded"]
    card = (data / "dataset" / "README.md").read_text()
    assert "2 sessions chosen by name. None was graded" in card and "rate %" not in card
    rows = load_dataset(str(data / "dataset"), "tokens", split="train")
    sampled = {name: records[name].rollout.calls[0].completion.token_ids for name in ("kept", "kept-too")}
    for row in rows:
        kept = [token for token, mask in zip(row["input_ids"], row["assistant_masks"], strict=True) if mask]
        assert tuple(kept) == sampled[row["task_id"]]
    assert sorted(rows["task_id"]) == ["kept", "kept-too"]
    for words, said in (
        (["--sessions", "cut"], "no finished session 'cut' with an answer"),
        (["--num_samples", "2"], "--recorded runs nothing, and nothing reads --num_samples"),
    ):
        assert main([*collect, *words]) == 2
        assert said in capsys.readouterr().err


def test_the_folder_goes_on_with_the_same_model_and_with_no_other(
    served: Served, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.process.wait()
    assert main(["serve", str(tiny_model), "--port", "0", "--output_dir", str(served.out)]) == 2
    assert "holds sessions of another model (SmolLM2-135M-Instruct" in capsys.readouterr().err


def test_a_folder_of_something_else_is_left_alone(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trained.jsonl").write_text("")
    assert main(["serve", str(tiny_model), "--port", "0", "--output_dir", str(tmp_path)]) == 2
    assert "holds trained.jsonl: it is the folder of something else" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "a model folder, a run's checkpoint-N, or a hub name"),
        (["no/such/folder"], "no such folder"),
        (["MODEL", "--key", "short"], "--key must have 8 to 128 letters"),
        (["MODEL", "--port", "80000"], "ports are 0 to 65535"),
        (["MODEL", "--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
        (["MODEL", "--temprature", "1"], "Did you mean 'temperature'?"),
        (["MODEL", "--solutions", "true"], "serve has none"),
        (["MODEL", "--config", "no.yaml"], "no file at 'no.yaml'"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    arguments: list[str], said: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny_model) if word == "MODEL" else word for word in arguments]
    assert main(["serve", *words, "--output_dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("polar-trl: ") and said in error


def test_an_adapter_is_merged_and_a_terminal_that_goes_ends_the_records(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).save_pretrained(adapter)
    served = start(adapter, out, "--max_completion_length", "8")
    assert "merging the adapter" in served.shown and (out / "merged" / "config.json").exists()
    assert SDKS["anthropic"](served.endpoint()).ask(stream=True).num_sampled_tokens <= 8
    served.hang_up()
    served.process.send_signal(signal.SIGHUP)
    served.process.wait(timeout=600)
    assert served.read("default").finished and len(served.read("default").rollout.calls) == 1


def test_another_servers_text_is_recorded_and_told_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def list_models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "strong", "max_model_len": 4096}]})

    async def answer(request: Request) -> Response:
        message = {"role": "assistant", "content": "As you wish."}
        return JSONResponse({"choices": [{"message": message, "finish_reason": "stop"}], "usage": {}})

    with serve_app({"/v1/models": list_models, "/v1/chat/completions": answer}) as address:
        served = start(None, tmp_path / "out", "--base_url", f"{address}/v1")
        for name, dialect in (("one", "openai_chat"), ("two", "google")):
            assert SDKS[dialect](served.endpoint(name)).ask(stream=True).text == "As you wish."
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(timeout=600) == 0
    assert main(["replay", "--json", str(served.out)]) == 0
    assert json.loads(capsys.readouterr().out)["text_only"] == 2


ENDLESS = """
import sys, time
from polar_trl.cli.process import interrupted_once
with interrupted_once():
    try:
        print("ready", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        print("ending", flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_second_signal_ends_it_at_once(number: signal.Signals) -> None:
    process = subprocess.Popen([*HEARING, sys.executable, "-c", ENDLESS], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.stdout.readline() == "ending\n"
    process.send_signal(number)
    assert process.wait(timeout=600) == -number


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    text: Any = capsys.readouterr().out
    assert ended.value.code == 0 and "examples:\n  polar-trl serve runs/pi/checkpoint-70" in text
