"""Claim jobs and exchange objects as one of several ranks: `ranks_worker.py OUT`, which each writes to."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from polar_trl.grpo.rollouts.distributed import connect_ranks
from polar_trl.rollout.ranks import JobQueues

dist.init_process_group("gloo")
ranks = connect_ranks(dist.get_world_size(), timeout_s=60)
queues = JobQueues(ranks, "batch", list(range(64 * ranks.num_ranks)))
queues.is_shared = True
claimed = []
while (job := queues.claim()) is not None:
    claimed.append(job)
# sizes differ, and one value is larger than a socket's buffer
received = ranks.exchange([{"from": ranks.rank, "to": rank, "ids": [7] * 10**rank} for rank in range(ranks.num_ranks)])
figures = {
    "claimed": claimed,
    "received": [(value["from"], value["to"], len(value["ids"])) for value in received],
    "gathered": ranks.gather(ranks.rank),
}
(Path(sys.argv[1]) / f"rank{ranks.rank}.json").write_text(json.dumps(figures))
dist.barrier()
dist.destroy_process_group()
