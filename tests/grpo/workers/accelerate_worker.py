"""Train under whatever `accelerate launch --config_file` set up: `accelerate_worker.py OUT KIND MODEL [lora]`.

KIND "rows" trains four steps on fixed rows, so that runs can be compared number by number; the second has a loss that
is NaN on the last rank, and the third no rows. "masters" trains rows with DeepSpeed in bfloat16,
in small steps, and keeps DeepSpeed's own masters; "agents" trains one step on sessions of real agents, and compares
the engine with the trainer after the last push. Each rank writes OUT/rank<N>.pt.
"""

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from sharded_on_cpu import configure_sharding
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, TrainerCallback
from trl.distributed import DistributedBackend

from polar_trl.grpo.config import PackedGRPOConfig
from polar_trl.grpo.packed_trainer import PackedGRPOTrainer
from polar_trl.grpo.rows import Row

out, kind, model = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if kind == "masters":
    transformers.training_args.is_torch_bf16_gpu_available = lambda *_: True  # DeepSpeed has it on a CPU too
common: dict[str, Any] = {
    **configure_sharding(),
    "bf16": kind == "masters",
    "learning_rate": 1e-6 if kind == "masters" else 1e-3,
    "gradient_checkpointing": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
    "shuffle_dataset": False,
}


class PresetRows(PackedGRPOTrainer):
    """Trains the rows of this rank, whatever is asked for."""

    preset: list[Row]
    has_faults = False

    def _collect_rows(self, inputs: Any, mode: str) -> list[Row]:
        return [] if self.has_faults and self.state.global_step == 2 else self.preset

    def _score(self, model: Any, micro_batch: Any) -> Any:
        logps, entropies = super()._score(model, micro_batch)
        if self.has_faults and self.state.global_step == 1 and self.accelerator.process_index == 1:
            logps = logps * torch.nan
        return logps, entropies


class WeightsOfSteps(TrainerCallback):
    """All weights after each step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.weights: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights.append(read_whole(self.trainer))


def build_rows(numbers: range) -> list[Row]:
    rows = []
    for number in numbers:
        rng = random.Random(number)
        length = rng.randint(20, 60)
        trainable = np.array([index >= 8 for index in range(length)])
        rows.append(
            Row(
                rollout_id=f"r{number}",
                token_ids_T=np.array([rng.randrange(3, 2000) for _ in range(length)]),
                trainable_T=trainable,
                logprobs_T=np.where(trainable, -rng.uniform(7.0, 8.0), 0.0).astype(np.float32),
                policy_versions_T=np.where(trainable, 0, -1),
                advantage=rng.uniform(-2, 2),
            )
        )
    return rows


def train_rows() -> tuple[Any, dict[str, Any]]:
    trainer = PresetRows(
        model=model,
        args=PackedGRPOConfig(
            output_dir=str(out),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_generations=4,
            max_steps=4 if kind == "rows" else 2,
            max_tokens_per_device=90,
            max_completion_length=64,
            vllm_importance_sampling_mode="token_truncate",
            **common,
        ),
        reward_funcs=lambda **_: [0.0],
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=Dataset.from_dict({"prompt": ["x"] * 8}),
    )
    trainer.use_vllm = True  # the loss is to read the importance ratio
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    trainer.preset = build_rows(range(rank * 8 // world, (rank + 1) * 8 // world))
    before = read_whole(trainer)
    trainer.has_faults = kind == "rows"
    callback = WeightsOfSteps(trainer)
    if kind == "rows":
        trainer.add_callback(callback)
    masters: list[torch.Tensor] = []

    class AtStart(transformers.TrainerCallback):
        """Keeps DeepSpeed's masters before the first step."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not masters:
                masters.append(read_masters(trainer))

    if kind == "masters":
        trainer.add_callback(AtStart())
    trainer.train()
    if masters:
        masters.append(read_masters(trainer))
    return trainer, {"before": before, "weights_of_steps": callback.weights, "masters": masters}


def train_agents() -> tuple[Any, dict[str, Any]]:
    from worker_common import build_trainer

    from polar_trl.engine.base import GenerationParams

    settings = {**common, "gradient_accumulation_steps": 1, "max_steps": 1}
    trainer = build_trainer(model, out, ["ok", "ok"], everything="lora" in sys.argv[4:], **settings)
    before = read_whole(trainer)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    trainer.vllm_generation.wake()
    change = (read_whole(trainer) - before).abs().max().item()
    prompt = tuple(trainer._tokenizer("The quick brown fox jumps over the lazy dog")["input_ids"])

    async def sample() -> Any:
        params = GenerationParams(max_tokens=8, temperature=0.0)
        return await trainer.vllm_generation.engine.generate(prompt, params)

    completion = asyncio.run(sample())
    with torch.no_grad():
        # a collective: under sharding, every rank computes its own engine's answer at the same time
        logits = trainer.model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
    own = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    gap = (own - torch.tensor(completion.logprobs)).abs().max().item()
    return trainer, {"gap": gap, "change": change, "policy_version": trainer.vllm_generation.engine.policy_version}


def read_whole(trainer: Any) -> torch.Tensor:
    """[P]: all weights of the policy, by name. A collective."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    whole = {}
    for name, weight in policy.named_parameters():
        with DistributedBackend(trainer.accelerator).gather_params([weight]):
            whole[name] = (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone().flatten()
    return torch.cat([whole[name] for name in sorted(whole)])


def read_masters(trainer: Any) -> torch.Tensor:
    """[P]: DeepSpeed's own, in the order of `read_whole`. A collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    named = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    return torch.cat([safe_get_full_fp32_param(named[name]).flatten().clone() for name in sorted(named)])


trainer, extra = train_agents() if kind == "agents" else train_rows()
weights = list(trainer.accelerator.unwrap_model(trainer.model).parameters())
kept = sum((w.to_local() if isinstance(w, DTensor) else w).numel() for w in weights)
result = {
    **extra,
    "distributed_type": str(trainer.accelerator.distributed_type.value),
    "weights": read_whole(trainer),
    "kept": kept,
    "skipped": [entry["polar/skipped_steps"] for entry in trainer.state.log_history if "loss" in entry],
    "rates": [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry],
    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
    "passes": [entry["polar/forward_passes"] for entry in trainer.state.log_history if "loss" in entry],
}
torch.save(result, out / f"rank{trainer.accelerator.process_index}.pt")
if kind == "agents":
    trainer.close()
