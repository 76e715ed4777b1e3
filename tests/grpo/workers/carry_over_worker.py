"""Train while sessions stay open, and keep the weights of every step: `carry_over_worker.py MODEL OUT`.

As two ranks, the second of a step's three groups lies on both.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from worker_common import build_trainer

out = Path(sys.argv[2])


is_first, is_alone = os.environ.get("RANK", "0") == "0", os.environ.get("WORLD_SIZE", "1") == "1"


class KeepWeights(TrainerCallback):
    """OUT/weights-N.pt: the policy after N optimizer steps."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if is_first:
            torch.save(model.state_dict(), out / "weights-0.pt")

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if is_first:
            torch.save(model.state_dict(), out / f"weights-{state.global_step}.pt")


trainer = build_trainer(
    sys.argv[1],
    out,
    ["ok", "dawdle", "ok", "dawdle", "ok", "dawdle"],
    max_policy_lag=1,
    max_agents=16 if is_alone else 4,
    max_preparing=4 if is_alone else 1,
    per_device_train_batch_size=4 if is_alone else 3,
    max_steps=4,
    learning_rate=5e-2,
)
trainer.add_callback(KeepWeights())
trainer.train()
trainer.close()
