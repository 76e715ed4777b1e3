"""Orders for the next batch, behind the data loader that training uses."""

from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from torch.utils.data import DataLoader
from trl.trainer.utils import RepeatSampler

from polar_trl.grpo.dataset import build_dataset, read_tasks
from polar_trl.grpo.rollouts.upcoming import UpcomingBatches
from polar_trl.sandbox.local import LocalSandboxBackend
from polar_trl.sandbox.pool import WarmPool
from polar_trl.types import Task


class NotingPool(WarmPool):
    """Keeps the ids of what was ordered."""

    def __init__(self, root: Path, depth: int) -> None:
        super().__init__(LocalSandboxBackend(root), depth=depth)
        self.ordered: list[str] = []

    def order(self, task: Task) -> None:
        self.ordered.append(task.id)


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("depth", [1, 4])
def test_each_batch_is_ordered_before_its_turn_and_none_before_that_of_another(
    tmp_path: Path, repeats: int, depth: int
) -> None:
    tasks = read_tasks([Task(id=str(index), instruction="x") for index in range(6)])
    dataset = build_dataset(tasks)
    assert dataset is not None
    pool = NotingPool(tmp_path, depth)
    upcoming = UpcomingBatches(pool, tasks, repeats=repeats)
    sampler = RepeatSampler(dataset, mini_repeat_count=2, batch_size=2, repeat_count=repeats, shuffle=False)
    seen: list[str] = []

    def collate(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return rows

    loader = DataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=upcoming.wrap(collate))
    loader = Accelerator(cpu=True).prepare(loader)
    batches = [["0", "0", "1", "1"], ["2", "2", "3", "3"], ["4", "4", "5", "5"]] * 2
    done = 0
    for _ in range(2):  # epochs
        for step, rows in enumerate(loader):
            if step % repeats == 0:
                seen = [row["task_id"] for row in rows]
                assert seen == batches[done]
                assert pool.ordered == [name for batch in batches[: done + 1] for name in batch[:depth]]
                upcoming.finish_rollouts()
                done += 1
    assert done == len(batches)
    pool.close()
