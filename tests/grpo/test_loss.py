"""Law 5 on numbers: cutting rollouts into rows, or spreading them over ranks, changes neither loss nor gradient."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def run_worker(script: str, *arguments: str, processes: int = 1) -> None:
    """Run a worker, under `accelerate launch` where it is several processes; its output is shown if it fails."""
    launch = [sys.executable]
    if processes > 1:
        launch = [
            # accelerate starts one process on a CPU, whatever --num_processes says, unless it is given --multi_gpu
            *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes)),
            *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        ]
    done = subprocess.run(
        [*launch, str(HERE / script), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


@pytest.fixture(scope="module")
def losses(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    import torch

    out = tmp_path_factory.mktemp("losses")
    for processes in (1, 2):
        run_worker("loss_worker.py", str(tiny_model), str(out), processes=processes)
    return {n: torch.load(out / f"losses-{n}.pt", weights_only=True) for n in (1, 2)}


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "cispo", "sapo", "luspo"])
@pytest.mark.parametrize(("processes", "parts"), [(1, 2), (1, 7), (2, 1), (2, 2), (2, 7)])
def test_loss_and_gradient_do_not_depend_on_the_split(
    losses: dict[int, Any], loss_type: str, processes: int, parts: int
) -> None:
    whole_loss, whole_gradient = losses[1][loss_type, 1]
    loss, gradient = losses[processes][loss_type, parts]
    assert whole_gradient.norm() > 1e-3
    assert abs(loss - whole_loss) <= 1e-5 * abs(whole_loss)
    assert (gradient - whole_gradient).norm() <= 1e-5 * whole_gradient.norm()
