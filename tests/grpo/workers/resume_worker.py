"""Train until a given moment, and wait to be killed: `resume_worker.py MODEL OUT MOMENT STEP [JSON settings]`.

MOMENT is "rollout" (agents wait in mid-session), "training" (after the backward pass), "checkpoint" (the model is
written, the optimizer is not), "push" (the engine has the first of the new weights), "ranks" (rank 0 has written its
part of a checkpoint and rank 1 not) or "never". It comes when STEP optimizer steps are done; OUT/now says that it is
there.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from worker_common import AGENT, CPU_SETTINGS, build_tasks, grade

from polar_trl.grade.function import FunctionGrader
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.resume import checkpoint
from polar_trl.grpo.trainer import PolarGRPOTrainer
from polar_trl.harness.mixed import MixedHarness
from polar_trl.harness.shell import ShellHarness
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.sandbox.pool import WarmPool

model, out, moment, step = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
settings = json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}
HOLD = out / "seen-by-agents" / "hold"
HOLD.parent.mkdir(exist_ok=True)


class Doomed(PolarGRPOTrainer):
    weights_at_start: float | None = None

    def is_time(self, name: str) -> bool:
        return name == moment and self.state.global_step == step

    def stand_still(self) -> None:
        # rank 0 is in a push once it has finished the checkpoint before; rank 1 may be there earlier
        if moment != "push" or self.accelerator.is_main_process:
            (out / "now").touch()
        time.sleep(600)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.weights_at_start is None:
            self.weights_at_start = sum(p.double().sum().item() for p in self.model.parameters())
        loss = super().training_step(*args, **kwargs)
        if self.is_time("training"):
            self.stand_still()
        return loss

    def stand_still_in_push(self, iterate: Any) -> Any:
        for number, item in enumerate(iterate()):
            if number == 1 and self.is_time("push"):
                self.stand_still()
            yield item

    def _collect_rows(self, *args: Any) -> Any:
        if self.is_time("rollout"):
            HOLD.touch()
        return super()._collect_rows(*args)

    def _save_optimizer_and_scheduler(self, *args: Any) -> None:
        if self.is_time("checkpoint"):
            self.stand_still()
        super()._save_optimizer_and_scheduler(*args)


arguments = {
    "output_dir": str(out),
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "num_generations": 2,
    "max_steps": 10,
    "save_steps": 3,
    "max_completion_length": 8,
    "learning_rate": 1e-3,
    "vllm_max_model_length": 512,
    "max_agents": 4,
    "drop_zero_variance": False,
    **CPU_SETTINGS,
}
agents = settings.pop("agents", None)
script = ShellHarness(
    f"python3 -I -S ~/agent.py {{instruction}} {HOLD}", files={"agent.py": AGENT.read_text(encoding="utf-8")}
)
trainer = Doomed(
    model=model,
    args=PolarGRPOConfig(**{**arguments, **settings}),
    train_dataset=build_tasks(["ok"] * 5),
    harness=MixedHarness(dict.fromkeys(agents, script), agents) if agents else script,
    # with the pool, orders are placed for batches that the loader hands out ahead
    sandbox=WarmPool(LocalSandboxBackend(mounts=[HOLD.parent]), depth=2),
    grader=FunctionGrader(grade),
)
params = trainer.vllm_generation._iter_named_params
trainer.vllm_generation._iter_named_params = lambda: trainer.stand_still_in_push(params)
save_rank_state = checkpoint.save_rank_state


def save_unless_it_is_time(folder: Path, rank: int, state: Any) -> None:
    if rank == 1 and trainer.is_time("ranks"):
        while not (folder / "polar_rank0.pt").exists():
            time.sleep(0.05)
        trainer.stand_still()
    save_rank_state(folder, rank, state)


checkpoint.save_rank_state = save_unless_it_is_time
trainer.train(resume_from_checkpoint="auto")
trainer.close()
weights = sum(p.double().sum().item() for p in trainer.model.parameters())
(out / f"weights-{trainer.accelerator.process_index}.json").write_text(json.dumps(weights))
if trainer.accelerator.is_main_process:
    result = {
        "log": trainer.state.log_history,
        "weights_at_start": trainer.weights_at_start,
        "seconds_before": trainer.resume.seconds_before,
    }
    (out / f"result-{os.getpid()}.json").write_text(json.dumps(result))
