"""Put faults into optimizer steps: `guard_worker.py OUT`, under one process or several.

Writes OUT/rank-R.json: of each case, step by step, digests of weights and of the optimizer's state, and what was
logged; and the error that ended it. Every fault is on the last rank only.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from preset_rows import PresetRows, build_common, build_model, build_rows, build_settings, share_rollouts
from transformers import TrainerCallback

from polar_trl.errors import StepError
from polar_trl.grpo.config import PackedGRPOConfig
from polar_trl.grpo.rows import Row


class Faulty(PresetRows):
    """Trains the same rows in each step, and does something wrong in some."""

    empty_steps: tuple[int, ...] = ()
    loss_steps: tuple[int, ...] = ()
    gradient_steps: tuple[int, ...] = ()
    late_steps: tuple[int, ...] = ()

    @property
    def is_last_rank(self) -> bool:
        return bool(self.accelerator.process_index == self.accelerator.num_processes - 1)

    def is_time(self, steps: tuple[int, ...]) -> bool:
        return self.is_last_rank and self.state.global_step + 1 in steps

    def _collect_rows(self, inputs: Any, mode: str) -> list[Row]:
        return [] if self.state.global_step + 1 in self.empty_steps else self.preset

    def _score(self, model: Any, micro_batch: Any) -> Any:
        """In one pass of the step, the model says NaN."""
        logps, entropies = super()._score(model, micro_batch)
        if self.is_time(self.loss_steps) and not self.is_done:
            self.is_done = True
            logps = logps * torch.nan
        return logps, entropies

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.is_done = False
        loss = super().training_step(*args, **kwargs)
        if self.is_time(self.late_steps):
            # behind the exchange of gradients: no other rank has it
            next(self.model.parameters()).grad[0] = torch.inf
        return loss


class Witness(TrainerCallback):
    """Keep what is left of each step."""

    def __init__(self, trainer: Faulty) -> None:
        self.trainer = trainer
        self.steps: list[dict[str, Any]] = [self.look()]

    def look(self) -> dict[str, Any]:
        optimizer = self.trainer.optimizer
        state = {} if optimizer is None else optimizer.state_dict()["state"]
        moments = [value for _, values in sorted(state.items()) for _, value in sorted(values.items())]
        weights = [parameter.detach() for parameter in self.trainer.model.parameters()]
        return {
            "weights": digest(weights),
            "state": digest(moments),
            "is_finite": all(bool(torch.isfinite(weight).all()) for weight in weights),
        }

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(self.look())


def digest(tensors: list[torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.contiguous().numpy().tobytes())
    return whole.hexdigest()


def run(out: Path, *, scaler: torch.amp.GradScaler | None = None, **wanted: Any) -> dict[str, Any]:
    faults = {name: wanted.pop(name) for name in list(wanted) if name.endswith("_steps") and name != "max_steps"}
    settings = {
        **build_settings(out),
        "gradient_accumulation_steps": 1,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "max_tokens_per_device": 200,
        "save_only_model": True,
        "save_steps": 1,
    }
    trainer = Faulty(
        model=build_model("llama"),
        args=PackedGRPOConfig(**{**settings, **wanted}),
        **build_common(),
    )
    trainer.preset = build_rows(share_rollouts(trainer), 1)
    for name, value in faults.items():
        setattr(trainer, name, value)
    if faults.get("gradient_steps"):
        weight = next(trainer.model.parameters())
        weight.register_hook(lambda grad: grad * torch.inf if trainer.is_time(trainer.gradient_steps) else grad)
    if scaler is not None:
        # what accelerate does on a GPU; it refuses float16 on a CPU
        trainer.accelerator.scaler, trainer.accelerator.native_amp = scaler, True
        AcceleratorState._shared_state["_mixed_precision"] = "fp16"
    witness = Witness(trainer)
    trainer.add_callback(witness)
    error = None
    try:
        trainer.train()
    except StepError as failure:
        error = str(failure)
    finally:
        AcceleratorState._shared_state["_mixed_precision"] = "no"
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "steps": witness.steps,
        "log": [{key: entry.get(key) for key in KEYS} for entry in logged],
        "error": error,
        "train_loss": [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry],
        "checkpoints": sorted(path.name for path in out.glob("checkpoint-*")),
        "final": witness.look(),
        "scale": None if scaler is None else scaler.get_scale(),
    }


KEYS = ("step", "loss", "grad_norm", "learning_rate", "polar/skipped_steps")

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    cases: dict[str, dict[str, Any]] = {
        "nan loss": {"loss_steps": (2,)},
        "infinite gradient": {"gradient_steps": (2,)},
        "infinite gradient, unclipped": {"gradient_steps": (2,), "max_grad_norm": 0.0},
        "infinite gradient, late": {"late_steps": (2,)},
        "no rows": {"empty_steps": (2,), "weight_decay": 0.1},
        "no rows, accumulated": {"empty_steps": (2,), "gradient_accumulation_steps": 2, "steps_per_generation": 1},
        "two apart": {"loss_steps": (1, 2, 4, 5), "max_steps": 6},
        "three in a row": {"loss_steps": (2, 3, 5), "empty_steps": (4,), "max_steps": 8, "save_strategy": "steps"},
        "spoiled weights": {"adam_epsilon": 0.0},
        "float16, no rows": {"scaler": torch.amp.GradScaler("cpu"), "empty_steps": (1, 3)},
        "float16, overflow": {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**26), "max_steps": 12},
        "float16, nan loss": {"scaler": torch.amp.GradScaler("cpu"), "loss_steps": (2, 3, 4)},
    }
    results = {}
    for name, case in cases.items():
        results[name] = run(folder / name.replace(" ", "-"), **case)
    (folder / f"rank-{PartialState().process_index}.json").write_text(json.dumps(results))
