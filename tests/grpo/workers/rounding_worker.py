"""Train texts with rounded weights: `rounding_worker.py MODEL OUT RESUME SETTINGS`, under one process or several.

RESUME is a checkpoint's folder or "none", SETTINGS are JSON. Each rank writes OUT/rank<N>.pt: what it holds when
training is over, and what its engine was given. The weights of a sharded model are whole there.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from bench_rounding import build_trainer, read_engine
from sharded_on_cpu import configure_sharding
from torch.distributed.tensor import DTensor

model, out, resume, settings = sys.argv[1], Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
trainer = build_trainer(model, output_dir=str(out), **settings, **configure_sharding())
trainer.train(resume_from_checkpoint=None if resume == "none" else resume)
trainer.engine_sync.push("train")


def whole(weight: Any) -> torch.Tensor:
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()


policy = trainer.accelerator.unwrap_model(trainer.model)
rounded = trainer.policy_weights.rounded
result = {
    "computing": {name: whole(weight) for name, weight in policy.named_parameters()},
    "engine": read_engine(trainer),
    "sharded": any(isinstance(weight, DTensor) for weight in policy.parameters()),
    "log": [line for line in trainer.state.log_history if "loss" in line],
}
rounded.restore_masters()
result["masters"] = {name: whole(weight) for name, weight in policy.named_parameters()}
rounded.round()
torch.save(result, out / f"rank{trainer.accelerator.process_index}.pt")
trainer.close()
