"""Train one step of GRPO on real bugs, in a real agent, in containers: `pypi_worker.py MODEL OUT TASKS`."""

import json
import sys
from pathlib import Path
from typing import Any

from worker_common import CPU_SETTINGS

from polar_trl.grade.by_task import GraderByTask
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.trainer import PolarGRPOTrainer
from polar_trl.harness import build_agent
from polar_trl.sandbox import build_backend
from polar_trl.sandbox.limits import Limits
from polar_trl.sandbox.pool import WarmPool
from polar_trl.tasks.environment import list_environments, provide_python
from polar_trl.tasks.load import load_task_set


def variety(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Noise solves no task: a second reward, so that there is a gradient."""
    return [len(set(ids)) / 100 for ids in completion_ids]


model, out, folder = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
limits = Limits(memory_mb=1500, disk_mb=1024)
agent = build_agent("pi")
tasks = provide_python(load_task_set(folder))
mounts = [*agent.folders, *list_environments(tasks)]
backend = build_backend("docker", image="polar-trl-test:latest", limits=limits, mounts=mounts, run_id=out.name)
pool = WarmPool(backend, depth=2)
trainer = PolarGRPOTrainer(
    model=model,
    args=PolarGRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_steps=1,
        max_completion_length=48,
        max_session_calls=3,
        learning_rate=1e-3,
        vllm_max_model_length=16384,
        max_agents=2,
        save_strategy="no",
        **CPU_SETTINGS,
    ),
    train_dataset=tasks,
    harness=agent,
    sandbox=pool,
    grader=GraderByTask(pool),
    reward_funcs=[variety],
)
before = [p.detach().clone() for p in trainer.model.parameters()]
trainer.train()
moved = max((a - b).abs().max().item() for a, b in zip(before, trainer.model.parameters(), strict=True))
trainer.close()
(out / "result.json").write_text(json.dumps({"log": trainer.state.log_history, "moved": moved}))
