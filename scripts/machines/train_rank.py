"""`polar-trl train`, which also writes this rank's weights to its machine's /tmp, at the start and at the end.

Each completion is sampled by a seed of its own, made of the prompt and the number of times that it came before under
one policy. So two runs sample the same for a group, in whatever order its sessions ask, and can be compared.
"""

import socket
from collections import Counter
from contextvars import ContextVar
from typing import Any
from zlib import crc32

import torch
import transformers

from polar_trl.cli.train import main
from polar_trl.engine import vllm


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


def seed_completions() -> None:
    seed: ContextVar[int] = ContextVar("seed")
    seen: Counter[Any] = Counter()
    generate, build = vllm.VllmEngine._generate, vllm.build_sampling_params

    async def generate_seeded(engine: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        key = engine.policy_version, tuple(prompt_ids)
        seen[key] += 1
        seed.set(crc32(repr((seen[key], key[1])).encode()))
        return await generate(engine, prompt_ids, *args, **kwargs)

    def build_seeded(*args: Any, **kwargs: Any) -> Any:
        params = build(*args, **kwargs)
        params.seed = seed.get(0)
        return params

    vllm.VllmEngine._generate, vllm.build_sampling_params = generate_seeded, build_seeded


if __name__ == "__main__":
    transformers.trainer.DEFAULT_CALLBACKS.append(WriteWeights)
    seed_completions()
    main()
