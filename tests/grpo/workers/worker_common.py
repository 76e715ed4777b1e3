"""Build tasks, graders and trainers for the worker scripts, which are processes: vLLM and gloo are one per process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peft import LoraConfig

from polar_trl.grade.base import Grade
from polar_trl.grade.function import FunctionGrader
from polar_trl.grpo.config import PolarGRPOConfig
from polar_trl.grpo.trainer import PolarGRPOTrainer
from polar_trl.harness.mixed import MixedHarness
from polar_trl.harness.shell import ShellHarness
from polar_trl.sandbox.base import Sandbox
from polar_trl.types import Call, Task

AGENT = Path(__file__).with_name("counting_agent.py")
CPU_SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
}
"""Of `PolarGRPOConfig`: a short run without a GPU, which reports every step to its own log and nowhere else."""


def grade(task: Task, sandbox: Sandbox) -> float:
    """A number that depends on what was sampled, so that groups of a random model have variance."""
    if task.metadata.get("behaviour") == "grader_raises":
        raise RuntimeError("this grader is broken on purpose")
    answer = sandbox.get("answer.txt")
    return 0.0 if answer is None else (sum(answer) % 11) / 10


def build_tasks(behaviours: list[str], cut_sessions: Any = None) -> list[Task]:
    return [
        Task(
            id=f"{index}-{behaviour}",
            instruction=f"task {index}: {behaviour}",
            agent_timeout_s=6.0 if behaviour == "sleep" else 120.0,
            cut_sessions=cut_sessions if behaviour == "sleep" else None,
            metadata={"behaviour": behaviour},
        )
        for index, behaviour in enumerate(behaviours)
    ]


def grade_with_calls(task: Task, sandbox: Sandbox, calls: Sequence[Call]) -> Grade:
    """The same, and a reward for each call."""
    rewards = {call.index: (sum(call.completion.token_ids) % 7) / 10 for call in calls}
    return Grade(reward=grade(task, sandbox), call_rewards=rewards)


def brevity(completions: list[Any], rollouts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A TRL reward function beside the grader: fewer distinct tokens are better."""
    assert all(completion[-1]["role"] in ("assistant", "user") for completion in completions)
    assert [len(ids) for ids in completion_ids] == [
        sum(len(call.completion.token_ids) for call in rollout.calls) for rollout in rollouts
    ]
    return [-len(set(ids)) / 100 for ids in completion_ids]


def build_trainer(
    model: str,
    output: Path,
    behaviours: list[str],
    *,
    everything: bool = False,
    agents: Mapping[str, float] | None = None,
    rewards_calls: bool = False,
    cut_sleepers: Any = None,
    **settings: Any,
) -> PolarGRPOTrainer:
    """A trainer on the tiny model; `everything` adds LoRA, evaluation and a TRL reward function.

    Args:
        agents: Weights of several agents, all of them the same script, and evaluation.
        rewards_calls: The grader gives each call a reward as well.
        cut_sleepers: `cut_sessions` of tasks whose agents sleep until their time is over.
    """
    script = ShellHarness("python3 -I -S ~/agent.py {instruction}", files={"agent.py": AGENT.read_text()})
    defaults: dict[str, Any] = {
        "output_dir": str(output),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_steps": 3,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "vllm_max_model_length": 512,
        "max_agents": 4,
        "save_strategy": "no",
        "shuffle_dataset": False,
        **CPU_SETTINGS,
    }
    return PolarGRPOTrainer(
        model=model,
        args=PolarGRPOConfig(**{**defaults, **settings}),
        train_dataset=build_tasks(behaviours, cut_sleepers),
        harness=MixedHarness(dict.fromkeys(agents, script), agents) if agents else script,
        grader=FunctionGrader(grade_with_calls if rewards_calls else grade),
        eval_dataset=build_tasks(["ok", "fork"]) if everything or agents else None,
        reward_funcs=[brevity] if everything else [],
        peft_config=LoraConfig(r=4, target_modules="all-linear") if everything else None,
    )
