"""Four real processes claim every job once and send each other objects; a rank waits for `ddp_timeout`, no longer."""

import json
import multiprocessing
import time
from pathlib import Path

import torch.distributed as dist
from launch import run_worker

from polar_trl.grpo.rollouts.distributed import connect_ranks


def test_four_processes_share_jobs_and_exchange_objects(tmp_path: Path) -> None:
    run_worker("ranks_worker.py", str(tmp_path), processes=4)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert sorted(job for rank in ranks for job in rank["claimed"]) == list(range(256))
    for number, rank in enumerate(ranks):
        assert rank["received"] == [[other, number, 10**number] for other in range(4)]
        assert rank["gathered"] == [0, 1, 2, 3]


def _meet(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    ranks = connect_ranks(2, timeout_s=1.0)
    if rank == 1:
        time.sleep(600)
    try:
        ranks.gather(None)
    except RuntimeError as error:
        (folder / "error").write_text(str(error))


def test_a_rank_waits_for_the_others_as_long_as_it_was_told(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    first, late = (spawn.Process(target=_meet, args=(tmp_path, rank)) for rank in (0, 1))
    first.start()
    late.start()
    try:
        first.join(120)
        assert "timed out" in (tmp_path / "error").read_text().lower()
    finally:
        for process in (first, late):
            process.kill()
            process.join()
