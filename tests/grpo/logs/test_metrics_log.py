"""`log.jsonl` of a run that was killed and resumed has each step once when it is read."""

import json
from pathlib import Path
from types import SimpleNamespace

from polar_trl.grpo.logs.metrics_log import MetricsLog
from polar_trl.run_folder import read_log


def state(step: int, *, rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, is_world_process_zero=rank == 0)


def test_the_later_line_of_a_step_counts(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run")
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.7)):  # killed in step 3, went on after step 1
        log.on_log(None, state(step), None, {"reward": reward})
    log.on_log(None, state(2), None, {"eval_reward": 0.9})
    log.on_log(None, state(4, rank=1), None, {"reward": 9.0})
    lines = read_log(tmp_path / "run")
    assert [line["reward"] for line in lines if "reward" in line] == [0.1, 0.7, 0.3]
    assert [line for line in lines if "eval_reward" in line] == [{"step": 2, "eval_reward": 0.9}]


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    whole = json.dumps({"step": 1, "reward": 0.5})
    (tmp_path / "log.jsonl").write_text(whole + "\n" + whole.replace("1", "2")[:9])
    assert read_log(tmp_path) == [{"step": 1, "reward": 0.5}]
    assert read_log(tmp_path / "none") == []
