"""Four real processes claim every job once and send each other objects."""

import json
from pathlib import Path

from launch import run_worker


def test_four_processes_share_jobs_and_exchange_objects(tmp_path: Path) -> None:
    run_worker("ranks_worker.py", str(tmp_path), processes=4)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert sorted(job for rank in ranks for job in rank["claimed"]) == list(range(256))
    for number, rank in enumerate(ranks):
        assert rank["received"] == [[other, number, 10**number] for other in range(4)]
        assert rank["gathered"] == [0, 1, 2, 3]
