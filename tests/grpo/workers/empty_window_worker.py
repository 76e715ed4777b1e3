"""A step fed by two generations, of which the last has no rows: `empty_window_worker.py OUT`, under two processes.

Writes OUT/rank-R.json: the sum of the weights before and after. Also checks that a loss over experts is refused.
"""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from loss_worker import SIZES, PresetRows, build_model, build_rows, build_settings, build_tokenizer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from polar_trl.errors import ConfigError
from polar_trl.grpo.config import PackedGRPOConfig
from polar_trl.grpo.rows import Row


class SecondIsEmpty(PresetRows):
    num_generations_seen = 0

    def _collect_rows(self, inputs: Any, mode: str) -> list[Row]:
        self.num_generations_seen += 1
        rank = self.accelerator.process_index
        return build_rows(range(4 * rank, 4 * rank + 4), 1) if self.num_generations_seen == 1 else []


def build(model: Any, out: Path) -> SecondIsEmpty:
    settings = {**build_settings(out), "per_device_train_batch_size": 4, "max_steps": 1, "learning_rate": 0.1}
    return SecondIsEmpty(
        model=model,
        args=PackedGRPOConfig(**settings, steps_per_generation=1, optim="sgd"),
        reward_funcs=lambda **_: [0.0],
        processing_class=build_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["x"] * 8}),
    )


def total(trainer: Any) -> float:
    return sum((p.double() ** 2).sum().item() for p in trainer.accelerator.unwrap_model(trainer.model).parameters())


out = Path(sys.argv[1])
trainer = build(build_model("llama"), out)
before = total(trainer)
trainer.train()
(out / f"rank-{trainer.accelerator.process_index}.json").write_text(json.dumps([before, total(trainer)]))
experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.01}
try:
    build(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, output_router_logits=True)), out)
except ConfigError as error:
    assert "router_aux_loss_coef: 0" in str(error)
else:
    raise AssertionError("a loss over experts was accepted")
