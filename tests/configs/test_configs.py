"""Parse every run file, and hold the paper's against what the paper states and against 80 GB of memory."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import Qwen3_5Config
from trl import get_peft_config
from trl.trainer.utils import RepeatSampler

from polar_trl.cli import main
from polar_trl.configs import find_packaged, list_configs
from polar_trl.grpo.arguments import parse_run
from polar_trl.grpo.meta_model import build_meta_model
from polar_trl.grpo.multimodal import exclude_unreached
from polar_trl.harness import AGENTS
from polar_trl.setup.agents import build_harness
from polar_trl.tasks.load import load_task_set
from polar_trl.tools.memory_plan.plan import PlanParser

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "polar_trl" / "configs"
PAPER = ("codex", "claude_code", "qwen_code", "pi")
FSDP2 = str(CONFIGS / "accelerate" / "fsdp2.yaml")
RUNS = list(list_configs("run"))
SMALL = [name for name in RUNS if name.startswith("small/")]
PAPER_PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
LADDER = (
    "quickstart",
    "ladder_commands",
    "ladder_files",
    "ladder_pi",
    "pi_1gpu",
)


def name_paper_run(kind: str) -> str:
    return f"swe_{kind}"


def read_values(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return values


def parse(name: str, *more: str) -> tuple[Any, Any, Any]:
    processes = 8 if "8gpu" in name else 1
    return parse_run(PlanParser(processes), ["--config", str(CONFIGS / f"{name}.yaml"), *more])


@pytest.fixture(scope="module")
def qwen35_4b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of Qwen3.5-4B's published class, and nothing else.

    The text model's sizes are those of scripts/gpu/train_cost.py. The vision tower's are transformers' defaults, which
    are those of larger models of the family: it is held and never trained.
    """
    config = Qwen3_5Config(
        text_config={
            "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
            "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "max_position_embeddings": 1 << 18, "tie_word_embeddings": True,
        },
        vision_config={"out_hidden_size": 2560},
        tie_word_embeddings=True,
    )  # fmt: skip
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    folder = tmp_path_factory.mktemp("qwen3.5-4b")
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_every_file_parses_and_says_how_it_is_started(name: str) -> None:
    text = (CONFIGS / f"{name}.yaml").read_text()
    run, args, model = parse(name)
    assert re.match(r"# \S.*\n", text)
    assert f"#   polar-trl train {name}" in text
    assert build_harness(run).name == ("+".join(run.agents) if run.agents else run.agent)
    assert args.output_dir.startswith("runs/")
    assert args.num_generations >= 8 and args.logging_steps == 1
    for key in ("tasks", "eval_tasks"):
        source = getattr(run, key)
        if source and source.startswith("polar_trl:"):
            assert load_task_set(source)
    assert model.model_name_or_path


@pytest.mark.parametrize("agent", PAPER)
@pytest.mark.parametrize("kind", ["8gpu", "1gpu"])
def test_what_the_paper_states(agent: str, kind: str) -> None:
    run, args, model = parse(name_paper_run(kind), "--agent", agent)
    assert (run.tasks, run.agent, run.sandbox) == ("skyrl-v0-293", agent, "docker")
    assert model.model_name_or_path == "Qwen/Qwen3.5-4B"
    assert args.num_generations == 16
    processes = 8 if kind == "8gpu" else 1
    batch = processes * args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert batch == args.generation_batch_size == 4 * 16
    assert (args.num_train_epochs, args.max_steps) == (1, -1)
    assert args.vllm_importance_sampling_correction
    assert args.vllm_importance_sampling_mode == "token_truncate"
    assert args.weight_decay == 0.1
    assert str(args.optim.value).startswith("adamw_torch")
    if kind == "8gpu":
        assert (args.learning_rate, model.use_peft) == (1e-6, False)
    # the installer's version of the agent, as docs/paper.md has it
    assert build_harness(run).name == agent
    shown = re.search(rf"^\| [\w ]+ \| \S+ \| {re.escape(AGENTS[agent].verified_version)} \| [\d,]+", PAPER_PAGE, re.M)
    assert shown is not None


def test_an_epoch_of_293_tasks_is_73_steps() -> None:
    """TRL takes whole batches of tasks, as the files' headers say."""
    sampler = RepeatSampler(
        list(range(293)), mini_repeat_count=16, batch_size=4, repeat_count=1, shuffle=True, seed=42
    )
    chosen = list(sampler)
    assert (len(chosen) / 64, len(set(chosen))) == (73, 292)


def test_one_gpu_differs_in_the_adapter_and_the_batch() -> None:
    eight, one = (read_values(name_paper_run(kind)) for kind in ("8gpu", "1gpu"))
    changed = {key for key in eight.keys() | one.keys() if eight.get(key) != one.get(key)}
    assert changed == {
        "output_dir", "model_init_kwargs", "use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules",
        "per_device_train_batch_size", "learning_rate", "max_agents",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["8gpu", "1gpu"])
def test_every_value_is_the_papers_or_has_a_reason(kind: str) -> None:
    """A key is under a heading with [paper], or has a comment of its own, or is in the list below."""
    plain = {
        # what they are is all that there is to say
        "tasks", "sandbox", "model_name_or_path", "output_dir", "use_peft",
        "logging_steps",
        # the paper's, by their heading
        "per_device_train_batch_size", "num_generations", "weight_decay",
        "vllm_importance_sampling_correction", "learning_rate",
    }  # fmt: skip
    text = (CONFIGS / f"{name_paper_run(kind)}.yaml").read_text()
    bare = {line.split(":")[0] for line in text.splitlines() if re.match(r"\w", line) and " # " not in line}
    assert bare <= plain, bare - plain


def plan(capsys: pytest.CaptureFixture[str], name: str, folder: Path, *more: str) -> dict[str, Any]:
    config = str(CONFIGS / f"{name}.yaml")
    status = main(["plan", "--config", config, "--gpu", "80GB", "--model_name_or_path", str(folder), "--json", *more])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (0 if report["fits"] else 1)
    return report


@pytest.mark.parametrize("kind", ["8gpu", "1gpu"])
def test_the_paper_runs_fit_on_80_gb(capsys: pytest.CaptureFixture[str], qwen35_4b: Path, kind: str) -> None:
    more = ("--gpus", "8", "--accelerate", FSDP2) if kind == "8gpu" else ()
    name = name_paper_run(kind)
    report = plan(capsys, name, qwen35_4b, *more)
    assert report["fits"]
    agents = read_values(name)["max_agents"]
    assert report["kv_sessions"] >= agents, "every agent's session at full length"
    peak = max(parts["total"] for parts in report["phases"].values())
    # docs/paper.md shows the peak of each
    shown = re.search(rf"\| `swe_{kind}` \|.*\| ([\d.]+) GiB \|", PAPER_PAGE)
    assert shown and float(shown[1]) == round(peak / (1 << 30), 1)


def test_adapters_are_on_all_of_the_language_model_and_on_nothing_else(qwen35_4b: Path) -> None:
    config = Qwen3_5Config.from_pretrained(qwen35_4b)
    config.text_config.num_hidden_layers = 4
    config.text_config.layer_types = config.text_config.layer_types[:4]
    _, _, model_config = parse(name_paper_run("1gpu"))
    adapter = get_peft_config(model_config)
    exclude_unreached(adapter, config)
    model = build_meta_model(config, dtype=torch.bfloat16, peft_config=adapter)
    adapted = {name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    linear = {
        name
        for name, module in build_meta_model(config, dtype=torch.bfloat16).named_modules()
        if type(module) is torch.nn.Linear and "language_model" in name
    }
    assert {name.removeprefix("base_model.model.") for name in adapted} == linear
    assert {name.rsplit(".", 1)[1] for name in linear} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",
    }  # fmt: skip
    assert model_config.lora_dropout == 0.0


def test_the_ladder_has_its_rungs() -> None:
    for number, name in enumerate(LADDER, start=1):
        header = (CONFIGS / f"{name}.yaml").read_text().split("\n\n")[0]
        assert f"Rung {number} of the ladder" in header
        assert "What it teaches:" in header and "Start reward:" in header
        assert "CPU cores" in header or "80 GB GPU" in header
    levels = [{task.metadata["level"] for task in load_task_set(read_values(n)["tasks"])} for n in LADDER[:4]]
    assert levels == [{0, 1}, {0, 1}, {1, 2}, {1, 2}]


def test_the_small_runs_differ_in_the_agent_alone() -> None:
    """Their tables compare agents: tasks, sampling and training are those of one file."""
    assert [name.removeprefix("small/") for name in SMALL] == sorted([*PAPER, "mixed"])
    for name in [name for name in SMALL if name != "small/mixed"]:
        values = read_values(name)
        assert set(values) == {"base", "agent", "agent_options", "output_dir"}
        assert (values["base"], values["agent"]) == ("polar_trl:small/base.yaml", name.removeprefix("small/"))
        assert set(values["agent_options"]) == {"tools"}


@pytest.mark.parametrize(("split", "num"), [("train", 96), ("test", 48)])
def test_the_small_task_sets_are_what_their_command_makes(split: Any, num: int) -> None:
    from polar_trl.tasks.shell_kinds import KINDS
    from polar_trl.tasks.shell_ladder import build_tasks

    kinds = [name for name, kind in KINDS.items() if kind.family and kind.level < 3]
    assert load_task_set(f"polar_trl:tasks/small_{split}.jsonl") == build_tasks(kinds, num, 0, split=split)


@pytest.mark.parametrize("name", LADDER[1:3])
def test_a_task_set_of_the_ladder_is_what_its_command_makes(name: str, tmp_path: Path) -> None:
    from polar_trl.tasks.jsonl import save_tasks
    from polar_trl.tasks.shell_ladder import build_tasks

    path = Path(find_packaged(read_values(name)["tasks"]))
    kinds = list(dict.fromkeys(task.metadata["kind"] for task in load_task_set(path)))
    save_tasks(tmp_path / "again.jsonl", build_tasks(kinds, 96, 0))
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()
