"""Train a few steps and write down what happened: `train_worker.py MODEL OUT BEHAVIOUR,... [JSON settings]`."""

import asyncio
import gc
import json
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback
from worker_common import build_trainer

from polar_trl.engine.base import GenerationParams
from polar_trl.types import Call, Trajectory

model, out, behaviours = sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(",")
settings = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
trainer = build_trainer(model, out, behaviours, **settings)
held = []


class CountHeld(TrainerCallback):
    """Counts the calls and trajectories that are in memory once a step is over."""

    def on_step_end(self, *_, **__):
        gc.collect()
        held.append(sum(type(value) in (Call, Trajectory) for value in gc.get_objects()))


trainer.add_callback(CountHeld())
before = [p.detach().clone() for p in trainer.model.parameters()]
trainer.train()
moved = max((a - b).abs().max().item() for a, b in zip(before, trainer.model.parameters(), strict=True))

# The weights that the engine samples from, against the trainer's own, after the last step.
trainer.vllm_generation.sync_weights(new_policy=False)  # the same weights once more are no new policy
trainer.vllm_generation.sync_weights()
trainer.vllm_generation.wake()
prompt = tuple(trainer._tokenizer("The quick brown fox jumps over the lazy dog")["input_ids"])


async def sample() -> object:
    return await trainer.vllm_generation.engine.generate(prompt, GenerationParams(max_tokens=24, temperature=0.0))


completion = asyncio.run(sample())
policy = trainer.accelerator.unwrap_model(trainer.model).eval()
with torch.no_grad():
    logits = policy(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
own = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
trainer.close()
if trainer.accelerator.is_main_process:
    result = {
        "log": trainer.state.log_history,
        "moved": moved,
        "held": held,
        "greedy_gap_max": (own - torch.tensor(completion.logprobs)).abs().max().item(),
        "greedy_is_argmax": logits.argmax(-1).tolist() == list(completion.token_ids),
        "num_greedy_tokens": len(completion.token_ids),
        "policy_version": trainer.vllm_generation.engine.policy_version,
        "weights_sum": sum(p.double().sum().item() for p in policy.parameters()),
    }
    (out / "result.json").write_text(json.dumps(result))
else:
    (out / f"rank{trainer.accelerator.process_index}.json").write_text(
        json.dumps({"weights_sum": sum(p.double().sum().item() for p in policy.parameters())})
    )
