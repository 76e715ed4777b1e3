"""Loss and gradient of the same rollouts, cut and spread in several ways: `loss_worker.py MODEL OUT`.

Under one process or several; every rank takes its share of the rollouts. Writes OUT/losses-<world size>.pt on rank 0.
"""

import random
import sys
from pathlib import Path

import torch
from worker_common import build_trainer

from polar_trl.grpo.batch import Row, split_batch
from polar_trl.reconstruct.cut import cut_trajectory
from polar_trl.reconstruct.merge import build_prefix_merged
from polar_trl.types import Call, ChatRequest, Completion, Message, Rollout

NUM_ROLLOUTS, NUM_CALLS = 8, 7
PARTS = (1, 2, 7)
LOSS_TYPES = ("dapo", "grpo", "dr_grpo", "cispo", "sapo", "luspo")


def build_rollout(seed: int) -> Rollout:
    """A session of growing conversation, with spans of uneven length."""
    rng = random.Random(seed)
    ids: tuple[int, ...] = tuple(rng.randrange(3, 2000) for _ in range(rng.randint(4, 12)))
    calls = []
    for index in range(NUM_CALLS):
        sampled = tuple(rng.randrange(3, 2000) for _ in range(rng.randint(1, 9)))
        calls.append(
            Call(
                session_id=f"r{seed}",
                index=index,
                dialect="openai_chat",
                request=ChatRequest(messages=(Message(role="user", text="x"),)),
                prompt_ids=ids,
                completion=Completion(
                    token_ids=sampled,
                    logprobs=tuple(-rng.uniform(5.0, 9.0) for _ in sampled),
                    finish_reason="stop",
                ),
                message=Message(role="assistant", text="y"),
            )
        )
        ids = ids + sampled + tuple(rng.randrange(3, 2000) for _ in range(rng.randint(1, 6)))
    return Rollout(id=f"r{seed}", task_id="t", group_id="g", calls=tuple(calls), reward=1.0)


trainer = build_trainer(sys.argv[1], Path(sys.argv[2]), ["ok"] * 8)
rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
trainer.model.train()
rng = random.Random(1)
advantages = [rng.uniform(-2, 2) for _ in range(NUM_ROLLOUTS)]
mine = range(rank * NUM_ROLLOUTS // world, (rank + 1) * NUM_ROLLOUTS // world)
results = {}
for loss_type in LOSS_TYPES:
    trainer.loss_type = loss_type
    for parts in PARTS:
        rows = []
        for number in mine:
            rollout = build_rollout(number)
            (whole,) = build_prefix_merged(rollout).trajectories
            rows += [Row(trajectory=t, advantage=advantages[number]) for t in cut_trajectory(whole, rollout, parts)]
        batch = trainer._build_batch(rows, "train")
        trainer.model.zero_grad()
        total = 0.0
        for inputs in split_batch(batch, trainer.args.steps_per_generation, by_length=parts != 2):
            loss = trainer._compute_loss(trainer.model, inputs)
            loss.backward()
            total += loss.item()
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        # What DistributedDataParallel does: the mean over ranks.
        gradient = trainer.accelerator.reduce(gradient, reduction="mean")
        total = trainer.accelerator.reduce(torch.tensor(total), reduction="mean").item()
        results[loss_type, parts] = (total, gradient.clone())
trainer.close()
if rank == 0:
    torch.save(results, Path(sys.argv[2]) / f"losses-{world}.pt")
