"""Train two steps and evaluate under every tracker: `tracking_worker.py MODEL OUT`. Trackers write where it runs."""

import sys
from pathlib import Path
from typing import Any

from worker_common import AGENT, CPU_SETTINGS, build_tasks, grade

from polar_trl.grade.function import FunctionGrader
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.trainer import PolarGRPOTrainer
from polar_trl.harness.shell import ShellHarness


def brevity(completion_ids: list[list[int]], log_extra: Any, **_: Any) -> list[float]:
    """A reward function with a column of its own."""
    log_extra("distinct", [len(set(ids)) for ids in completion_ids])
    return [-len(set(ids)) / 100 for ids in completion_ids]


model, out = sys.argv[1], Path(sys.argv[2])
trainer = PolarGRPOTrainer(
    model=model,
    args=PolarGRPOConfig(
        output_dir=str(out),
        project="polar",
        run_name="tracked",
        trackio_static_space_id=False,
        log_completions=True,
        num_completions_to_print=1,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        max_completion_length=12,
        vllm_max_model_length=512,
        max_agents=4,
        save_strategy="no",
        shuffle_dataset=False,
        **{**CPU_SETTINGS, "report_to": ["tensorboard", "wandb", "trackio"]},
    ),
    train_dataset=build_tasks(["grader_raises", "ok"]),
    eval_dataset=build_tasks(["fork"]),
    harness=ShellHarness("python3 -I -S ~/agent.py {instruction}", files={"agent.py": AGENT.read_text()}),
    grader=FunctionGrader(grade),
    reward_funcs=[brevity],
)
trainer.train()
trainer.close()
