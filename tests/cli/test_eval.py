"""Test `polar-trl eval` as a process: vLLM's CPU build, a real model, an agent; kills, adapters, two engines."""

import dataclasses
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launch import find_warm_python
from openai_servers import serve_app
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from trl import ModelConfig

from polar_trl.cli import _build_parser, main
from polar_trl.errors import ConfigError
from polar_trl.eval.arguments import EvalArguments
from polar_trl.eval.evaluate import summarize_results
from polar_trl.eval.sample_tasks import SampleResult, read_results
from polar_trl.eval.setup import parse_eval
from polar_trl.eval.workers import find_devices
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.resume.model_folder import find_model, merge_adapter
from polar_trl.setup.run_setup import RunArguments

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ("--config", str(ROOT / "polar_trl" / "configs" / "quickstart.yaml"))
EVAL = ("-m", "polar_trl", "eval")
DOCS = (ROOT / "docs" / "eval.md").read_text(encoding="utf-8")


def find_commands(text: str, program: str) -> list[list[str]]:
    """The arguments of the commands in a text, continued lines joined."""
    found = re.findall(rf"^ *{re.escape(program)} (.*)$", text.replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(line) for line in found]


def start(out: Path, *keys: str, log: Path, before: Sequence[str] = ()) -> "subprocess.Popen[bytes]":
    command = [*before, sys.executable, *EVAL, *QUICKSTART, "--output_dir", str(out), *keys]
    with log.open("wb") as file:
        return subprocess.Popen(command, cwd=ROOT, stderr=file)


def run(out: Path, *keys: str) -> tuple[dict[str, Any], str]:
    """The summary on standard output, which holds nothing else, and what was said."""
    command = [find_warm_python(), *EVAL, *QUICKSTART, "--output_dir", str(out), "--json", *keys]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr


def wait_for_results(process: "subprocess.Popen[bytes]", out: Path, count: int, log: Path) -> None:
    deadline = time.monotonic() + 200
    while len(read_results(out)) < count:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)


@dataclasses.dataclass(frozen=True)
class Resumed:
    """An evaluation that was killed, then interrupted, then run to its end."""

    out: Path
    keys: list[str]
    killed: list[SampleResult]
    """Results that were there after the kill, and after the interrupt."""
    stopped: list[SampleResult]
    exit_status: int
    stop_log: str
    summary: dict[str, Any]
    end_log: str


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    """The first command of docs/eval.md, three times."""
    folder = tmp_path_factory.mktemp("eval")
    out, log = folder / "out", folder / "log"
    documented = find_commands(DOCS, "polar-trl eval")[0]
    assert documented[:2] == ["--config", "quickstart"]
    assert documented[-2:] == ["--output_dir", "runs/eval"]
    keys = documented[2:-2]
    process = start(out, *keys, log=log)
    wait_for_results(process, out, 2, log)
    process.kill()
    process.wait()
    killed = read_results(out)

    process = start(out, *keys, log=log)
    wait_for_results(process, out, len(killed) + 2, log)
    process.send_signal(signal.SIGINT)
    exit_status = process.wait(timeout=600)
    stopped, stop_log = read_results(out), log.read_text()
    summary, end_log = run(out, *keys)
    return Resumed(out, keys, killed, stopped, exit_status, stop_log, summary, end_log)


def test_a_kill_and_an_interrupt_keep_the_results_so_far(resumed: Resumed) -> None:
    killed, stopped = resumed.killed, resumed.stopped
    assert resumed.exit_status == 130
    assert stopped[: len(killed)] == killed and len(stopped) < 12
    assert f"{len(killed)} graded sessions and 0 without a reward are there already" in resumed.stop_log
    last = resumed.stop_log.splitlines()[-1]
    assert last == "polar-trl: stopped; the same command goes on with what is left"
    assert f"{12 - len(stopped)} sessions are left to run on the CPU" in resumed.end_log
    assert read_results(resumed.out)[: len(stopped)] == stopped


def test_no_session_is_run_twice_and_each_has_a_reward(resumed: Resumed) -> None:
    results = read_results(resumed.out)
    assert set(Counter((result.task, result.sample) for result in results).values()) == {1} and len(results) == 12
    for result in results:
        assert 1 <= result.calls <= 2 and 1 <= result.sampled_tokens <= 64
    # every session that ended is a whole record; those that were stopped have no end
    on_disk = {str(path.relative_to(resumed.out)) for path in resumed.out.rglob("sessions/*/*.jsonl")}
    assert {result.record for result in results} < on_disk


def test_what_libraries_print_is_in_a_file(resumed: Resumed) -> None:
    said = (resumed.stop_log + resumed.end_log).splitlines()
    assert not [line for line in said if re.search("[Ww]arning|WARNING|safetensors|it/s|session/s|Ignoring", line)]
    assert f"what libraries print is in {resumed.out / 'libraries.log'}" in resumed.end_log
    assert "safetensors" in (resumed.out / "libraries.log").read_text()


def test_the_summary_is_that_of_the_results(resumed: Resumed) -> None:
    results, summary = read_results(resumed.out), resumed.summary
    num_passed = sum(result.reward == 1.0 for result in results)
    assert summary["sessions"] == {"wanted": 12, "graded": 12, "passed": num_passed, "failed": 0, "missing": 0}
    assert json.loads((resumed.out / "summary.json").read_text()) == summary
    assert set(summary["by"]) == {result.task.rsplit("-", 2)[0] for result in results}
    assert summary["pass_at"]["1"]["rate"] == pytest.approx(num_passed / 12)
    assert summary["pass_at"]["2"]["rate"] >= summary["pass_at"]["1"]["rate"]
    assert summary["mean_reward"] == pytest.approx(sum(result.reward or 0.0 for result in results) / 12)


def test_where_all_is_done_no_engine_is_started_and_another_setting_is_refused(
    resumed: Resumed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ["eval", *QUICKSTART, "--output_dir", str(resumed.out), *resumed.keys]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "12, 12 graded" in printed and "pass@1 in % (95 % interval)" in printed and "copy_command" in printed
    assert main([*arguments, "--eval_temperature", "0.3"]) == 2
    assert "another setting: temperature is 0.3 and was 0.7; set it back" in capsys.readouterr().err


def test_an_adapter_is_merged_and_evaluated(tmp_path: Path, tiny_model: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    adapter = tmp_path / "run" / "checkpoint-7"
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(adapter)
    out = tmp_path / "out"
    summary, said = run(out, "--model_name_or_path", str(adapter), "--limit", "2", "--max_agents", "2")
    assert summary["sessions"]["graded"] == 2 and summary["model"] == str(adapter)
    assert f"merging the adapter {adapter} onto {tiny_model}: {out / 'merged'}" in said
    assert "checkpoint-7 " in json.loads((out / "settings.json").read_text())["model"]

    name = "model.layers.0.self_attn.q_proj.weight"
    lora = load_file(adapter / "adapter_model.safetensors")
    a, b = (lora[f"base_model.model.{name.replace('weight', f'lora_{side}.weight')}"] for side in "AB")
    weights = [load_file(folder / "model.safetensors") for folder in (tiny_model, out / "merged")]
    torch.testing.assert_close(weights[1][name], weights[0][name] + 2.0 * b @ a, atol=1e-6, rtol=0)
    assert not torch.equal(weights[1][name], weights[0][name])
    assert (out / "merged" / "tokenizer.json").exists()
    assert str(tmp_path) not in (out / "merged" / "polar_merged.json").read_text()
    # once: the same adapter finds its merged model, another one does not
    stamp = (out / "merged" / "model.safetensors").stat().st_mtime_ns
    merge_adapter(find_model(str(adapter)), out / "merged")
    assert (out / "merged" / "model.safetensors").stat().st_mtime_ns == stamp
    for name, target in (("mine", "mine"), ("other.part", "other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").touch()
        with pytest.raises(ConfigError, match=f"{name} is not an adapter merged earlier"):
            merge_adapter(find_model(str(adapter)), tmp_path / target)
        assert (tmp_path / name / "notes.txt").exists()
    # one that a kill left half written, and one of another adapter, are replaced
    (out / "merged.part").mkdir()
    for folder in (out / "merged", out / "merged.part"):
        (folder / "polar_merged.json").write_text("{}")
    merge_adapter(find_model(str(adapter)), out / "merged")
    assert (out / "merged" / "model.safetensors").stat().st_mtime_ns != stamp
    assert not (out / "merged.part").exists()


def test_two_engines_share_the_work_and_end_with_their_parent(tmp_path: Path, tiny_model: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    keys = ("--model_name_or_path", str(tiny_model), "--limit", "8", "--num_engines", "2", "--max_agents", "1")
    # as a script's shell starts what it puts in the background
    process = start(out, *keys, log=log, before=("bash", "-c", "trap '' INT; exec \"$@\"", "bash"))
    wait_for_results(process, out, 1, log)
    workers = find_workers(out)
    assert len(workers) == 2
    process.kill()  # they hear of it by the pipe alone
    process.wait()
    deadline = time.monotonic() + 60
    while find_workers(out):
        assert time.monotonic() < deadline, "an engine outlived the process that started it"
        time.sleep(0.1)

    summary, _ = run(out, *keys)
    results = read_results(out)
    assert summary["sessions"] == {"wanted": 8, "graded": 8, "passed": 0, "failed": 0, "missing": 0}
    assert set(Counter(result.task for result in results).values()) == {1}
    starts: dict[str, set[int]] = {}
    for result in results:
        starts.setdefault(result.record.split("/")[1], set()).add(int(result.rollout[1:6]) % 2)
    assert all(len(shares) == 1 for shares in starts.values())  # each engine kept to its own
    assert {share for shares in starts.values() for share in shares} == {0, 1}


def test_a_server_can_be_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that gives no token ids, and is asked for none; it knows the answer to one of two tasks."""
    asked: list[str] = []

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "strong", "max_model_len": 4096}]})

    async def answer(request: Request) -> Response:
        question = (await request.json())["messages"][-1]["content"]
        asked.append(question)
        message = {"role": "assistant", "content": "```bash\n" + question.partition("command: ")[2] + "\n```"}
        return JSONResponse(
            {"id": "c", "object": "chat.completion", "choices": [{"message": message, "finish_reason": "stop"}]}
        )

    monkeypatch.chdir(ROOT)
    out = tmp_path / "out"
    with serve_app({"/v1/models": list_models, "/v1/chat/completions": answer}) as url:
        keys = ["--base_url", f"{url}/v1", "--text_only", "--limit", "2", "--served_name", "strong", "--json"]
        assert main(["eval", *QUICKSTART, "--output_dir", str(out), *keys]) == 0
    summary = json.loads(capsys.readouterr().out)
    rewards = {result.task: result.reward for result in read_results(out)}
    assert rewards["copy_command-1-0000"] == 1.0 and rewards["copy_file-1-0001"] != 1.0
    assert (summary["model"], summary["pass_at"]["1"]["rate"]) == ("strong", 0.5)
    assert any("echo sun > milk.txt" in question for question in asked)
    settings = json.loads((out / "settings.json").read_text())
    assert (settings["engine"], settings["served_name"]) == ("server", "strong")


def find_workers(out: Path) -> list[int]:
    """Process ids of the engines that write into this folder."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"--worker" in words and str(out).encode() in words:
            parents[int(folder.name)] = parent
    # a child that an engine has just forked still has its arguments
    return [pid for pid, parent in parents.items() if parent not in parents]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["--num_sampels", "2"], "Did you mean 'num_samples'?"),
        (["--k", "1", "4"], "k must be at most num_samples=1 (it is [1, 4])"),
        (["--num_samples", "0"], "num_samples must be at least 1 (it is 0)"),
        (["--task_ids", "nope"], "has no task 'nope'"),
        (["--by", "colour"], "by is 'colour', and no task has it in its metadata"),
        (["--tasks", "nope.jsonl"], "no task file at nope.jsonl"),
        (["--model_name_or_path", "no/such"], "no model at 'no/such'"),
        (["--model_name_or_path", "docs"], "'docs' holds no model: neither config.json nor adapter_config.json"),
        (["--model_name_or_path", "README.md"], "'README.md' is a file; name the folder"),
        (["--model_revision", "v2"], "model_revision is not read: the engine loads"),
        (["--grader", "nope.nope:nope"], "there is no module 'nope'"),
        (["--config", "ladder_pi", "--vllm_max_model_length", "4096"], "window of 4096 tokens is too"),
        (["--config", "nope"], "--config: no file at 'nope', and no run file of that name; there are ladder_commands"),
        (["--base_url", "http://127.0.0.1:9/v1", "--num_engines", "2"], "num_engines must be 1 with base_url"),
        (["--served_name", "x"], "served_name is about a server; give its base_url"),
    ],
)
def test_one_sentence(
    tmp_path: Path,
    keys: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["eval", *QUICKSTART, "--output_dir", str(tmp_path / "out"), *keys]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("polar-trl: ") and message in last
    assert not (tmp_path / "out").exists()


def test_which_tasks_and_how_sampled(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    text = (ROOT / "polar_trl" / "configs" / "quickstart.yaml").read_text()
    config.write_text(text + "eval_tasks: held_out.jsonl\nper_device_eval_batch_size: 3\n")
    setup = parse_eval(config, [], tmp_path)
    assert (setup.tasks, setup.params.temperature, setup.params.max_tokens) == ("held_out.jsonl", 0.7, 32)
    assert parse_eval(config, ["--tasks", "mine.jsonl"], tmp_path).tasks == "mine.jsonl"
    assert parse_eval(config, ["--tasks=mine.jsonl"], tmp_path).tasks == "mine.jsonl"
    assert parse_eval(config, ["--tasks", "a", "--eval_tasks", "b"], tmp_path).tasks == "b"
    sets = '{"easy": "a.jsonl", "hard": "b.jsonl"}'
    with pytest.raises(ConfigError, match=r"give --tasks with one of a.jsonl \(easy\), b.jsonl \(hard\)"):
        parse_eval(config, ["--eval_tasks", sets], tmp_path)
    assert parse_eval(config, ["--eval_tasks", '{"easy": "a.jsonl"}'], tmp_path).tasks == "a.jsonl"
    keys = ["--eval_temperature", "0", "--eval_top_p", "0.9", "--eval_top_k", "20"]
    params = parse_eval(config, keys, tmp_path).params
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 0.9, 20)
    # without a run file; an answer may then be as long as an agent's turns are
    bare = ["--tasks", "t.jsonl", "--agent", "pi", "--sandbox", "bwrap", "--model_name_or_path", "m"]
    setup = parse_eval(None, bare, tmp_path)
    assert (setup.tasks, setup.model, setup.run.agent, setup.params.max_tokens) == ("t.jsonl", "m", "pi", 4096)
    # a run of eight processes is evaluated by one
    config.write_text(text + "generation_batch_size: 64\n")
    with pytest.raises(ConfigError, match="no_such_key"):
        parse_eval(config, ["--no_such_key", "1"], tmp_path)
    assert parse_eval(config, ["--num_generations", "64"], tmp_path).params.temperature == 0.7


def test_every_documented_command_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    from polar_trl.cli.eval import EPILOG

    monkeypatch.chdir(ROOT)
    commands = [*find_commands(DOCS, "polar-trl eval"), *find_commands(EPILOG, "polar-trl eval")]
    assert len(commands) == 6
    for words in commands:
        args, rest = _build_parser().parse_known_args(["eval", *words])
        setup = parse_eval(args.config, rest, args.output_dir)
        assert (setup.run.agent, setup.evaluation.num_samples) in {("shell", 1), ("shell", 2), ("pi", 1), ("pi", 4)}
    others = {
        "json",
        "config",
        "dry",
        "render",
        "data",
        "sft",
        "train",
        "trained",
        "matrix",
        "jobs",
        "picture",
    }  # of others, too
    assert set(re.findall(r"`--(\w+)", DOCS)) - others <= {
        name for group in (EvalArguments, RunArguments, PolarGRPOConfig, ModelConfig) for name in vars_of(group)
    }


def vars_of(group: type) -> set[str]:
    return {field.name for field in dataclasses.fields(group)}


def test_pass_at_1_is_always_in_the_summary(tmp_path: Path) -> None:
    setup = parse_eval(
        ROOT / "polar_trl" / "configs" / "quickstart.yaml", ["--num_samples", "4", "--k", "4"], tmp_path
    )
    assert list(summarize_results(setup, [])["pass_at"]) == ["1", "4"]


def test_the_second_ctrl_c_is_answered_in_one_line() -> None:
    """The first one's cleaning up goes on, and the interpreter prints no traceback; the third ends it."""
    code = (
        "import os, signal, sys\n"
        "from polar_trl.cli.process import sigterm_interrupts\n"
        "try:\n"
        "    with sigterm_interrupts():\n"
        "        try:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "        finally:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "            print('cleaned', flush=True)\n"
        "except KeyboardInterrupt:\n"
        "    pass\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "cleaned\n")
    assert done.stderr == "polar-trl: stopping, sandboxes are being removed; once more ends it at once\n"


def test_which_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2,GPU-aa")
    assert find_devices(2) == ["5", "2"]
    with pytest.raises(ConfigError, match="num_engines is 4, and there are 3 GPUs"):
        find_devices(4)
