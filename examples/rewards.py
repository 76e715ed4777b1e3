"""The graders and reward functions of docs/rewards.md, and a run with several of them.

python examples/rewards.py MODEL REWARD_MODEL
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

from polar_trl import FunctionGrader, Grade, PolarGRPOConfig, PolarGRPOTrainer, ShellHarness, Task

AGENT = Path(__file__).parent / "own_repository" / "image" / "agent.py"


def grade_report(task, sandbox):
    """Compare a file that the agent wrote with the answer that the task holds."""
    content = sandbox.get("report.json")  # bytes; None if there is no such file
    try:
        report = json.loads(content or b"")
    except ValueError:
        return 0.0  # the agent's fault: a reward of 0, not an exception
    return float(isinstance(report, dict) and report.get("lines") == task.metadata["lines"])


def grade_program(task, sandbox):
    """Run the program that the agent wrote, and compare what it prints."""
    result = sandbox.run("python3 -I main.py", env={}, timeout_s=10)
    return float(result.exit_code == 0 and result.stdout.strip() == task.metadata["output"])


def grade_steps(task, sandbox):
    """Give a share of the reward for each part of the work."""
    parts = {
        "it is there": sandbox.get("main.py") is not None,
        "it compiles": sandbox.run("python3 -I -m py_compile main.py", env={}, timeout_s=10).exit_code == 0,
        "it is right": grade_program(task, sandbox) == 1.0,
    }
    return sum(parts.values()) / len(parts)


def grade_calls(task, sandbox, calls):
    """Reward a session for its work, and take something from each call whose arguments the agent could not read."""
    malformed = [call for call in calls if any(tool.parse_status == "malformed" for tool in call.message.tool_calls)]
    return Grade(reward=grade_program(task, sandbox), call_rewards={call.index: -0.2 for call in malformed})


def ask_judge(task, sandbox):
    """Have a model judge a text, over HTTP. What it raises leaves the session without a reward."""
    text = (sandbox.get("summary.txt") or b"").decode(errors="replace")
    if not text.strip():
        return 0.0
    question = f"Task: {task.instruction}\n\nAnswer: {text}\n\nHow good is it, from 0 to 10? Answer with the number."
    request = urllib.request.Request(
        os.environ["JUDGE_URL"] + "/chat/completions",
        json.dumps({"model": "judge", "messages": [{"role": "user", "content": question}], "temperature": 0}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('JUDGE_KEY', '')}"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)["choices"][0]["message"]["content"]
    return min(max(float(answer), 0.0), 10.0) / 10


def few_calls(rollouts, **kwargs):
    """A TRL reward function: fewer model calls are better. One number per rollout."""
    return [-len(rollout.calls) / 50 for rollout in rollouts]


def says_done(completions, **kwargs):
    """A TRL reward function over what was said: the conversation after the instruction, as messages."""
    return [float("done" in completion[-1]["content"].lower()) for completion in completions]


def train(model, reward_model, **settings):
    """Train on the grader's reward, a little on few calls, and on what a reward model says."""
    trainer = PolarGRPOTrainer(
        model=model,
        args=PolarGRPOConfig(reward_weights=[1.0, 0.1, 0.5], **settings),  # the grader's weight first
        train_dataset=[
            Task(id=f"say-{word}", instruction=f"Write main.py that prints {word}.", metadata={"output": word})
            for word in ("pear", "fig", "plum", "lime")
        ],
        harness=ShellHarness("python3 ~/agent.py {instruction}", files={"agent.py": AGENT.read_text()}),
        grader=FunctionGrader(grade_steps),
        reward_funcs=[few_calls, reward_model],
    )
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    train(*sys.argv[1:3], output_dir="runs/rewards")
