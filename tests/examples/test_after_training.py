"""Test docs/after-training.md on a tiny Qwen3: SFT, GRPO, the merged adapter, vLLM with the options of the page."""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
import torch
from collect_sessions import TOOL, record_folder
from doc_pages import ROOT, find_blocks, list_lines
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from launch import list_warm_programs
from peft import AutoPeftModelForCausalLM
from tiny_qwen import build_tiny_qwen3
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_server import serve_vllm

from polar_trl.cli import _build_parser as build_parser
from polar_trl.cli import main
from polar_trl.collect.data_set import Selection, build_data_set
from polar_trl.collect.run import parse_collection
from polar_trl.grpo.resume.hub import UPLOADED

PAGE = ROOT / "docs" / "after-training.md"
MERGE, _, SERVE, SERVE_ADAPTER, SERVE_CPU, LOGIN, UPLOAD, UPLOAD_RUN, COLLECT, SFT, TRAIN = list_lines(
    "\n".join(find_blocks(PAGE, "bash"))
)
TWO_CORES = (
    "--sandbox bwrap --agent_command 'python3 ~/agent.py {instruction}' --agent_files image/agent.py "
    "--check_tasks false --use_cpu true --bf16 false --gradient_checkpointing false --vllm_enable_sleep_mode false "
    "--max_steps 1 "
    "--gradient_accumulation_steps 2 --num_generations 2 --vllm_max_model_length 2048 --max_completion_length 32 "
    "--max_session_calls 2 --drop_zero_variance false --entropy_coef 0.01"
)


def run(command: str, folder: Path) -> str:
    env = os.environ | {"PATH": list_warm_programs()}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{(done.stdout + done.stderr)[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's folder after `sft.py`, which trained a tiny Qwen3 on sessions that were recorded."""
    folder = tmp_path_factory.mktemp("after") / "own_repository"
    shutil.copytree(ROOT / "examples" / "own_repository", folder, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    base = build_tiny_qwen3(smollm2, folder / "Qwen" / "Qwen3-4B")
    recorder = record_folder(base, folder / "recorded")
    build_data_set(recorder.folder, folder / "runs" / "collect" / "dataset", Selection(), agent="shell", model="tiny")
    (block,) = find_blocks(PAGE, "python")
    small = "learning_rate=1e-5, max_steps=1, use_cpu=True, bf16=False, report_to='none'"
    assert block.count("learning_rate=1e-5") == 1
    (folder / "sft.py").write_text(block.replace("learning_rate=1e-5", small))
    run(SFT, folder)
    return folder


@pytest.fixture(scope="module")
def merged(folder: Path) -> Path:
    """GRPO goes on from there with LoRA, and `polar-trl merge` writes one model of it."""
    run(f"{TRAIN} {TWO_CORES}", folder)
    assert "runs/merged" in run(MERGE.replace("runs/own_repository", "runs/grpo"), folder)
    return folder / "runs" / "merged"


def test_the_merged_model_is_base_and_adapter(folder: Path, merged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # the adapter names its base as it was given
    adapter = json.loads((folder / "runs" / "grpo" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "runs/sft"
    tokenizer = AutoTokenizer.from_pretrained(merged)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained("runs/sft").chat_template
    ids = torch.tensor([tokenizer.encode("The file is there.")])
    parts = AutoPeftModelForCausalLM.from_pretrained("runs/grpo", dtype=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    with torch.no_grad():
        assert torch.allclose(parts(ids).logits, whole(ids).logits, atol=1e-3)


def test_the_merged_model_has_a_card_and_no_path(folder: Path, merged: Path) -> None:
    cards = [ModelCard.load(place / "README.md") for place in (folder / "runs" / "grpo", merged)]
    assert [card.data.library_name for card in cards] == ["peft", "transformers"]
    assert cards[0].data.base_model is None and "A LoRA adapter for sft, trained with" in cards[0].text
    assert "\nsft trained with" in cards[1].text and "AutoPeftModel" not in cards[1].text
    assert ("/" not in (merged / "polar_merged.json").read_text()) and str(folder) not in cards[1].content


def test_an_upload_of_a_run_has_the_model_and_nothing_else(folder: Path) -> None:
    words = shlex.split(UPLOAD_RUN)
    patterns: dict[str, list[str]] = {"--include": [], "--exclude": []}
    for flag, pattern in zip(words[4::2], words[5::2], strict=True):
        patterns[flag].append(pattern)
    for run_folder, weights in (("grpo", "adapter_model.safetensors"), ("sft", "model.safetensors")):
        place = folder / "runs" / run_folder
        (place / "checkpoint-1").mkdir(exist_ok=True)
        (place / "checkpoint-1" / "config.json").touch()
        files = [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()]
        sent = set(
            filter_repo_objects(files, allow_patterns=patterns["--include"], ignore_patterns=patterns["--exclude"])
        )
        pushed = set(filter_repo_objects(files, allow_patterns=[*UPLOADED], ignore_patterns=["*/*", "polar_masters*"]))
        assert sent == pushed and weights in sent and not sent & {"settings.json", "summary.json"}


def test_a_whole_model_is_not_merged(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", str(folder / "runs" / "sft"), str(tmp_path / "out")]) == 2
    assert "is a whole model, no adapter" in capsys.readouterr().err


def test_vllm_serves_it_with_the_options_of_the_page(merged: Path, tmp_path: Path) -> None:
    python, _, module, _, model, *options = shlex.split(SERVE_CPU)
    assert (python, module, model) == ("python", "vllm.entrypoints.openai.api_server", "runs/merged")
    options[options.index("8192")] = "1024"
    with serve_vllm(merged, tmp_path / "log.txt", *options) as url:
        messages = [{"role": "user", "content": "List the files."}]
        body = {"model": "mine", "messages": messages, "tools": [TOOL], "max_tokens": 16}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] > 0
        body = {"model": "mine", "messages": messages, "max_tokens": 16}
        reply = httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": "none"}, timeout=600)
        assert reply.status_code == 200 and reply.json()["usage"]["output_tokens"] > 0, reply.text


def test_options_and_parsers_are_those_of_vllm() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    for command in (SERVE, SERVE_ADAPTER):
        _, _, model, *options = shlex.split(command)
        assert parser.parse_args(["--model", model, *options]).tool_call_parser == "hermes"
    rows = [line.split("|")[2:4] for line in PAGE.read_text().splitlines() if line.startswith("| ") and "`" in line]
    tools, reasoning = ({word for row in rows for word in row[column].split("`")[1::2]} for column in (0, 1))
    assert tools - {"--tool-call-parser"} <= set(ToolParserManager.list_registered())
    assert reasoning - {"--reasoning-parser"} <= set(ReasoningParserManager.list_registered())


def test_the_hubs_command_has_these_words(tmp_path: Path) -> None:
    assert "Usage:" in run(f"{LOGIN} --help", ROOT)
    for name in ("merged", "own_repository"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text("{}")
    env = os.environ | {"PATH": list_warm_programs(), "HF_HUB_OFFLINE": "1"}
    for command in (UPLOAD, UPLOAD_RUN):
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 1 and "offline" in done.stderr, done.stderr  # its usage would be status 2


def test_a_teacher_collects_with_the_run_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples" / "own_repository")
    args, rest = build_parser().parse_known_args(shlex.split(COLLECT)[1:])
    collection = parse_collection(args.config, rest, Path(args.output_dir), Selection())
    assert collection.setup.run.tasks == "tasks.jsonl"
    assert collection.setup.model == "Qwen/Qwen3-32B"
