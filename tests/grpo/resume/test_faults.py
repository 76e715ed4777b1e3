"""Killed in a push of weights, and between the files of two ranks: a run goes on from a whole checkpoint.

Nothing is trained twice, and `polar-trl replay` finds every trained row in the records.
"""

from pathlib import Path

import pytest
from resume_runs import finish, kill_at, read_lines

from polar_trl.cli import main
from polar_trl.grpo.resume.checkpoint import find_problem, list_checkpoints

SETTINGS = {"save_steps": 1, "max_steps": 4}


@pytest.mark.parametrize(("moment", "step", "processes"), [("push", 2, 1), ("push", 2, 2), ("ranks", 2, 2)])
def test_a_kill_costs_no_more_than_the_steps_since_a_whole_checkpoint(
    tiny_model: Path, tmp_path: Path, moment: str, step: int, processes: int
) -> None:
    start = kill_at(tiny_model, tmp_path, moment, step, processes=processes, **SETTINGS)
    assert start.trained_steps == (1, 2)
    assert start.partial == (("checkpoint-2",) if moment == "ranks" else ())
    assert moment == "push" or (tmp_path / "checkpoint-2" / "polar_rank0.pt").is_file()
    finish(tiny_model, tmp_path, processes=processes, **SETTINGS)
    lines = read_lines(tmp_path / "trained.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    trained = [rollout for line in lines for rollout in line["rollouts"]]
    assert len(trained) == len(set(trained)) == 8 * processes
    # step 2 was made again where its checkpoint was not whole
    lost = read_lines(tmp_path / "lost.jsonl") if (tmp_path / "lost.jsonl").exists() else []
    assert [line["step"] for line in lost] == ([2] if moment == "ranks" else [])
    assert all(find_problem(folder) is None for _, folder in list_checkpoints(tmp_path))
    assert main(["replay", str(tmp_path)]) == 0
