# %% [markdown]
# # Train a small model inside a shell agent, from a notebook
#
# Two CPU cores, no GPU, a few minutes. The agent is a program of its own that asks an OpenAI-compatible server for one
# shell command; training points it at the trainer's proxy and changes nothing in it. The extra `cpu` of the package is
# all that is needed: the model of 135M parameters is made at first use.
#
# This notebook is `examples/notebook.py`, executed by `scripts/dev/make_notebook.py`.

# %%
from pathlib import Path

from polar_trl import FunctionGrader, PolarGRPOConfig, PolarGRPOTrainer, ShellHarness, Task
from polar_trl.configs import find_packaged
from polar_trl.recording.log import read_record

# %% [markdown]
# ## Tasks and a grader
#
# A task is an instruction, and files if it needs some. The grader looks at what the agent left in its sandbox and
# returns a number.

# %%
WORDS = ["fig", "plum", "lime", "pear", "box", "map", "hat", "cup", "tea", "ship", "desk", "corn"]
HELD_OUT = ["leaf", "coin", "lamp", "rope", "milk", "sand", "wolf", "moon"]


def make_task(word):
    name = f"{word}.txt"
    return Task(id=f"copy-{word}", instruction=f"Copy the file {name} to copy.txt", files={name: f"the {word}\n"})


def grade(task, sandbox):
    (original,) = task.files.values()
    return float(sandbox.get("copy.txt") == original.encode())


# %% [markdown]
# ## The trainer
#
# TRL's `GRPOTrainer`, with an agent (`harness`) and a grader. Every argument of TRL's `GRPOConfig` applies.

# %%
args = PolarGRPOConfig(
    output_dir="runs/notebook",
    max_steps=10,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    num_generations=8,
    num_generations_eval=1,
    learning_rate=1e-5,
    lr_scheduler_type="constant",
    temperature=0.7,
    max_completion_length=32,
    max_session_calls=2,
    vllm_max_model_length=1024,
    gradient_checkpointing=False,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
)
agent = Path(find_packaged("polar_trl:agents/shell_agent.py"))
trainer = PolarGRPOTrainer(
    model=find_packaged("polar_trl:models/SmolLM2-135M-Instruct"),
    args=args,
    train_dataset=[make_task(word) for word in WORDS],
    eval_dataset=[make_task(word) for word in HELD_OUT],
    harness=ShellHarness("python3 ~/agent.py --max-turns 1 {instruction}", files={"agent.py": agent.read_text()}),
    grader=FunctionGrader(grade),
)

# %%
result = trainer.train()

# %% [markdown]
# ## What came of it
#
# Each step logs its mean reward; the rest is in `runs/notebook/log.jsonl`, and `polar-trl inspect runs/notebook`
# shows it as a page, down to the tokens of each session.

# %%
for line in trainer.state.log_history:
    if "reward" in line:
        print(f"step {line['step']}: reward {line['reward']:.2f}, {line['polar/sampled_tokens']:.0f} tokens sampled")

# %% [markdown]
# `evaluate` runs the agent on tasks that were not trained, one session each.

# %%
figures = trainer.evaluate()

# %% [markdown]
# A session on disk: what the agent asked, and what the model answered.

# %%
record = sorted(Path("runs/notebook/sessions").glob("*/train_*/*.jsonl"))[-1]
session = read_record(record).rollout
for call in session.calls:
    print(call.request.messages[-1].text, "\n->", call.message.text, "\n")
print("reward:", session.reward)

# %% [markdown]
# Engine, proxy and sandboxes are closed with the trainer; `with PolarGRPOTrainer(...) as trainer:` does the same.

# %%
trainer.close()
