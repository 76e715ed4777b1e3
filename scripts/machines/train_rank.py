"""`polar-trl train`, which also writes this rank's weights to its machine's /tmp, at the run's start and at its end."""

import socket
from typing import Any

import torch
import transformers

from polar_trl.cli.train import main


class WriteWeights(transformers.TrainerCallback):
    """/tmp/start.pt and /tmp/end.pt: step, weights in one row, host name."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Write the weights that the run begins or goes on with."""
        write(state, model, "start")

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Write those that it ends with."""
        write(state, model, "end")


def write(state: Any, model: Any, moment: str) -> None:
    weights = torch.cat([weight.detach().flatten().float() for weight in model.parameters()])
    torch.save({"step": state.global_step, "weights": weights, "host": socket.gethostname()}, f"/tmp/{moment}.pt")


if __name__ == "__main__":
    transformers.trainer.DEFAULT_CALLBACKS.append(WriteWeights)
    main()
