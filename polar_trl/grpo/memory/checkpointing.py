"""Checkpoint as many decoder layers in each pass as the GPU's free memory needs, and no more.

What a pass takes is counted from the model's own code (`memory.count_pass`), what is free is read before a step's
first pass, and the first step is measured: where its peak was above what was free, later passes checkpoint more. If a
pass runs out of memory in spite of it, its whole step is trained again with more layers checkpointed.
"""

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from math import ceil
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from polar_trl.errors import ConfigError
from polar_trl.grpo.memory.memory import SPARE, PassMemory, count_pass, count_prefix
from polar_trl.grpo.memory.setup import Setup, choose_kernels
from polar_trl.grpo.packing.prefix import keep_prefix
from polar_trl.grpo.packing.supported import find_causal_model

logger = logging.getLogger(__name__)

_MORE = 8
"""One in so many layers is checkpointed more after a pass that ran out of memory."""


class Checkpointing:
    """The layers of a model that are checkpointed, pass by pass.

    Args:
        args: The config.
        accelerator: Of the trainer.
        model: The policy, in PEFT's wrapper or not.
        read_room: Bytes that a step's passes may take on this rank, or None where that is not known.
    """

    def __init__(
        self, args: Any, accelerator: Any, model: Any, *, read_room: Callable[[], float | None] | None = None
    ) -> None:
        self._args = args
        self._accelerator = accelerator
        self._model = model
        self._read_room = read_room or self._read_free_memory
        layers = getattr(find_causal_model(model).get_decoder(), "layers", ())
        self._layers = [layer for layer in layers if isinstance(layer, GradientCheckpointingLayer)]
        self._counted: tuple[tuple[int, PassMemory], tuple[int, PassMemory]] | None = None
        self._is_counted: bool | None = None
        self._extra = 0
        self._is_checked = False
        self._room: float | None = None

    def choose(self, passes: Sequence[Any]) -> list[int]:
        """Choose the number of checkpointed layers for each pass of a step, the same on every rank (a collective).

        Passes of ranks that share weights compute in step, and a layer that one of them computes again is gathered.
        """
        if not passes or not self._args.gradient_checkpointing:
            return [0] * len(passes)
        if self._args.checkpointed_layers is not None:
            return [min(self._args.checkpointed_layers, len(self._layers))] * len(passes)
        self._room = self._read_room()
        if self._room is None or not self._can_count():
            return [len(self._layers)] * len(passes)
        layouts = [micro_batch["packed"].layout for micro_batch in passes]
        prefixes = {len(layout.prefix.token_ids) for layout in layouts if layout.prefix is not None}
        self._room -= max(map(self._count_kept, prefixes), default=0)
        tokens = [float(layout.num_tokens) for layout in layouts]
        if self._accelerator.num_processes > 1:
            own = torch.tensor([-self._room, *tokens], dtype=torch.float64, device=self._accelerator.device)
            room, *tokens = self._accelerator.gather(own).view(-1, len(own)).amax(dim=0).tolist()
            self._room = -room
        chosen = [self.count(int(n)).choose(self._room) for n in tokens]
        return [min(len(self._layers), n + self._extra) if n or self._extra else 0 for n in chosen]

    @contextmanager
    def apply(self, micro_batch: Any, checkpointed: int) -> Iterator[None]:
        """Run a pass with its first layers checkpointed, and with what layers keep of its prefix.

        Raises `ConfigError` where it runs out of memory for good.
        `torch.OutOfMemoryError` is raised on where the step can be trained again, after another `choose`.
        """
        if self._args.gradient_checkpointing:
            for index, layer in enumerate(self._layers):
                layer.gradient_checkpointing = index < checkpointed
        layout = micro_batch["packed"].layout
        num_tokens = layout.num_tokens
        is_measured = self._room is not None and not self._is_checked and self._accelerator.device.type == "cuda"
        peak = 0
        try:
            with keep_prefix(layout, find_causal_model(self._model), self._accelerator):
                before = self._measure_from_here() if is_measured else 0
                yield
                if is_measured:
                    peak = torch.cuda.max_memory_allocated() - before
        except torch.OutOfMemoryError as error:
            self._require_more(num_tokens, checkpointed, error)
            self._extra += ceil(len(self._layers) / _MORE)
            raise
        if is_measured:
            self._compare(num_tokens, checkpointed, peak)

    def end_step(self, chosen: Sequence[int]) -> dict[str, float]:
        """Return the figures of a step that was trained; the first one's memory has been compared."""
        if chosen:
            self._is_checked = True
        return {"polar/checkpointed_layers": sum(chosen) / len(chosen)} if chosen else {}

    def count(self, num_tokens: int) -> PassMemory:
        """Count a pass of so many tokens: all of it grows in proportion, but for copies of weights."""
        if self._counted is None:
            setup = build_setup(self._args, self._accelerator, self._model)
            half = max(1, setup.num_tokens // 2)
            setups = [replace(setup, num_tokens=half), setup]
            is_apart = self._accelerator.device.type == "cuda"
            first, second = count_apart(setups) if is_apart else map(count_pass, setups)
            self._counted = (half, first), (setup.num_tokens, second)
        (low, first_bytes), (high, second_bytes) = self._counted
        share = (num_tokens - low) / max(1, high - low)

        def extend(name: str) -> int:
            start, end = getattr(first_bytes, name), getattr(second_bytes, name)
            return round(start + (end - start) * share)

        return PassMemory(**{item.name: extend(item.name) for item in fields(PassMemory)})

    def count_spare_tokens(self) -> int | None:
        """Count the tokens of a prefix that layers can keep beside the largest pass (a collective).

        None where memory is not known, as on a CPU; 0 where a pass or the keys and values cannot be counted.
        """
        room = self._read_room()
        if room is None:
            return None
        spare = 0.0
        with suppress(ConfigError):
            if self._can_count():
                most = len(self._layers) if self._args.checkpointed_layers is None else self._args.checkpointed_layers
                checkpointed = most if self._args.gradient_checkpointing else 0
                states = self._count_kept(0)  # of recurrent layers, whatever the prefix's length
                spare = room - self.count(self._args.max_tokens_per_device).peak(checkpointed) - states
                spare /= self._count_kept(1) - states
        own = torch.tensor([spare], dtype=torch.float64, device=self._accelerator.device)
        return max(0, int(self._accelerator.gather(own).min()))

    def _count_kept(self, num_tokens: int) -> int:
        """Bytes that layers keep of a prefix of so many tokens, with its gradients."""
        policy = find_causal_model(self._model)
        itemsize = 2 if self._accelerator.mixed_precision in ("bf16", "fp16") else policy.dtype.itemsize
        return count_prefix(policy.config, num_tokens, itemsize)

    def _can_count(self) -> bool:
        """Tell whether a pass can be counted; where it cannot, every layer is checkpointed, as TRL does."""
        if self._is_counted is None:
            try:
                self.count(self._args.max_tokens_per_device)
                self._is_counted = True
            except Exception:  # the model's own code, on tensors without data: it may do anything
                logger.warning("every layer is checkpointed: its memory could not be counted", exc_info=True)
                self._is_counted = False
        return self._is_counted

    def _require_more(self, num_tokens: int, checkpointed: int, error: BaseException) -> None:
        """Refuse to train a step again where it would not help, or where other ranks wait in this pass."""
        why = (
            f"a pass of {num_tokens:,} tokens ran out of GPU memory with {checkpointed} of {len(self._layers)} layers"
        )
        if not self._args.gradient_checkpointing or self._args.checkpointed_layers is not None:
            raise ConfigError(
                f"{why} checkpointed: set gradient_checkpointing: true and leave checkpointed_layers out, or lower "
                f"max_tokens_per_device (it is {self._args.max_tokens_per_device})"
            ) from error
        if checkpointed >= len(self._layers):
            raise ConfigError(
                f"{why} checkpointed, which is all: lower max_tokens_per_device (it is "
                f"{self._args.max_tokens_per_device}) or max_trajectory_tokens; polar-trl plan says what fits"
            ) from error
        if self._accelerator.num_processes > 1:
            raise ConfigError(
                f"{why} checkpointed, and other processes wait in it: resume with checkpointed_layers: "
                f"{min(len(self._layers), checkpointed + ceil(len(self._layers) / 4))}"
            ) from error

    def _read_free_memory(self) -> float | None:
        """Bytes of this rank's GPU that passes may take: free or kept by torch for later, less gradients to come."""
        device = self._accelerator.device
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached - SPARE * total - self._count_missing_gradients()

    def _count_missing_gradients(self) -> int:
        weights = (weight for weight in self._model.parameters() if weight.requires_grad and weight.grad is None)
        return sum(weight.nbytes for weight in weights)

    def _measure_from_here(self) -> int:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() + self._count_missing_gradients()

    def _compare(self, num_tokens: int, checkpointed: int, peak: int) -> None:
        """Compare a pass with its prediction, and let later ones checkpoint more where memory was not enough."""
        counted = self.count(num_tokens)
        logger.info(
            "%d of %d layers checkpointed in a pass of %d tokens: %.1f GiB, predicted %.1f, free %.1f",
            *(checkpointed, len(self._layers), num_tokens),
            *(size / 2**30 for size in (peak, counted.peak(checkpointed), self._room or 0)),
        )
        over = peak - (self._room or 0)
        per_layer = (counted.none_saved - counted.every_saved) / max(1, len(self._layers))
        if over > 0 and per_layer > 0:
            self._extra = max(self._extra, ceil(over / per_layer))


def count_apart(setups: list[Setup]) -> list[PassMemory]:
    """Count passes in a process that sees no GPU: there, a kernel that `kernel_shapes` does not know would be run on
    tensors without memory. Raises `ConfigError`."""
    code = "from polar_trl.grpo.memory.checkpointing import answer_count; answer_count()"
    found = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(setups),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        check=False,
    )
    if found.returncode:
        raise ConfigError(f"a pass could not be counted: {found.stderr.decode(errors='replace')[-2000:]}")
    counted: list[PassMemory] = pickle.loads(found.stdout)
    return counted


def answer_count() -> None:
    """Count the passes that are on standard input, and write them to standard output, as pickles."""
    answer, sys.stdout = sys.stdout.buffer, sys.stderr
    answer.write(pickle.dumps([count_pass(setup) for setup in pickle.load(sys.stdin.buffer)]))


def build_setup(args: Any, accelerator: Any, model: Any) -> Setup:
    """Describe the passes of a trainer as `polar-trl plan` does from its run file; of the engine nothing is asked."""
    policy = find_causal_model(model)
    sharding: Any = {"FSDP": "fsdp2", "DEEPSPEED": "zero3"}.get(accelerator.distributed_type.value, "none")
    peft_config = model.peft_config[model.active_adapter] if hasattr(model, "peft_config") else None
    frozen = [weight.dtype for weight in policy.parameters() if not weight.requires_grad]
    return Setup(
        model_config=policy.config,
        dtype=frozen[0] if peft_config is not None and frozen else policy.dtype,
        bf16=accelerator.mixed_precision in ("bf16", "fp16"),
        optim="sgd",  # its states are there already when memory is read
        gradient_checkpointing=True,
        num_tokens=args.max_tokens_per_device,
        peft_config=peft_config,
        has_reference=False,
        sharding=sharding,
        num_gpus=accelerator.num_processes,
        gpu_bytes=0,
        engine_share=0.0,
        engine_num_seqs=1,
        sleeps=True,
        max_model_len=1,
        kernels=choose_kernels(args, policy.config),
    )
