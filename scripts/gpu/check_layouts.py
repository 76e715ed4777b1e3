#!/usr/bin/env python3
"""Check that flat layouts compute on this device what each row alone computes; exit code 1 if not.

  python scripts/gpu/check_layouts.py            # CPU or GPU, whichever there is

Random small Qwen3 and Qwen3.5 models, rows of odd lengths that share prefixes: log-probabilities and gradients of
"packed" and "tree" against the same model on each row alone with SDPA and, for its gated delta nets, transformers'
code in torch. In float32, and in bfloat16 against float32 (where the row alone is as far off). On a GPU with
flash-linear-attention its kernels are what is checked: they multiply float32 in TF32 (10 bits), hence their limit.
"""

import sys
import time
from typing import Any

import numpy as np
import torch
from fla_tuning import limit_tuning
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from polar_trl.grpo.packing import fla_kernels
from polar_trl.grpo.packing.forward import pack_rows, prepare_model, score
from polar_trl.grpo.packing.linear_attention import computed_in_torch
from polar_trl.grpo.packing.prefix import SharedPrefix

VOCAB = 1000
KEPT = 256
"""Tokens that the layers keep from pass to pass."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2}


def build_model(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    if name == "qwen3":
        model: Any = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    else:
        sizes = {"linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **HYBRID, **sizes))
    return model.to(device=device, dtype=dtype)


def build_rows() -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(0)
    common, shorter = rng.integers(VOCAB, size=700), 300
    lengths = [(700, 500), (700, 90), (700, 1300), (shorter, 640), (0, 33), (700, 1)]
    rows = [np.concatenate([common[:shared], rng.integers(VOCAB, size=own)]) for shared, own in lengths]
    scored = [np.concatenate([[False], rng.random(len(row) - 1) < 0.3]) for row in rows]
    for row, mask in zip(rows, scored, strict=True):
        mask[: min(KEPT + 1, len(row) - 1)], mask[-1] = False, True
    return rows, scored


def train(model: Any, kind: Any, rows: list[Any], scored: list[Any]) -> tuple[Tensor, Tensor]:
    """Log-probabilities [S], and the gradient of their weighted sum.

    Args:
        kind: "packed", "tree", None for each row alone, or "kept": three passes, whose prefix the layers keep.
    """
    device = next(model.parameters()).device
    model.zero_grad()
    weights = torch.randn(sum(int(mask.sum()) for mask in scored), generator=torch.Generator().manual_seed(1))
    if kind is None:
        parts = []
        for row, mask in zip(rows, scored, strict=True):
            ids = torch.from_numpy(row)[None].to(device)
            with computed_in_torch(model):
                logps = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            at = torch.from_numpy(np.flatnonzero(mask)).to(device)
            parts.append(logps[at - 1].gather(-1, ids[0, at, None])[:, 0])
        logps = torch.cat(parts)
    elif kind == "kept":
        return train_keeping(model, rows, scored, weights.to(device))
    else:
        logps = score(model, pack_rows(rows, scored, kind=kind, device=device))[0]
    (logps * weights.to(device)).sum().backward()
    gradient = torch.cat([p.grad.flatten().float() for p in model.parameters()])
    return logps.detach().float(), gradient


def train_keeping(model: Any, rows: list[Any], scored: list[Any], weights: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward of the first rows, then of others, then of the last, which begin with one prefix."""
    prefix = SharedPrefix(rows[0][:KEPT])
    prefix.fill(model, weights.device)
    parts = []
    weights_of = weights.split([int(mask.sum()) for mask in scored])
    for some in (slice(0, 2), slice(2, 5), slice(5, None)):
        role: Any = "read" if some.stop else "close"
        packed = pack_rows(rows[some], scored[some], kind="tree", device=weights.device, after=(prefix, role))
        logps = score(model, packed)[0]
        (logps * torch.cat(weights_of[some])).sum().backward()
        parts.append(logps.detach().float())
    return torch.cat(parts), torch.cat([p.grad.flatten().float() for p in model.parameters()])


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, scored = build_rows()
    failed = False
    has_fla = fla_kernels.load_kernels(device) is not None
    limit_tuning(1)
    started = time.perf_counter()
    print("model    dtype     layout   max |difference| of log-probabilities   gradient, relative   limit   seconds")
    for name, dtype, limit in (
        ("qwen3", torch.float32, 1e-4),
        ("qwen3", torch.bfloat16, 0.2),
        ("qwen3_5", torch.float32, 2e-2 if has_fla else 1e-4),
        ("qwen3_5", torch.bfloat16, 0.1),
    ):
        truth = train(build_model(name, device, torch.float32), None, rows, scored)
        model = build_model(name, device, dtype)
        found = {"alone": train(model, None, rows, scored)}
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        prepare_model(model, "tree")
        found |= {kind: train(model, kind, rows, scored) for kind in ("packed", "tree", "kept")}
        for kind, (logps, gradient) in found.items():
            gap = (logps - truth[0]).abs().max().item()
            relative = ((gradient - truth[1]).norm() / truth[1].norm()).item()
            seconds = time.perf_counter() - started
            failed |= not (gap <= limit and relative <= limit)
            print(
                f"{name:8} {str(dtype)[6:]:9} {kind:8} {gap:38.2e} {relative:20.2e} {limit:7.0e} {seconds:9.1f}",
                flush=True,
            )
    print(f"gated delta nets: {'flash-linear-attention' if has_fla else 'torch'}")
    print(
        "FAILED"
        if failed
        else f"as each row alone, on {torch.cuda.get_device_name() if device.type == 'cuda' else 'a CPU'}"
    )
    sys.exit(failed)


if __name__ == "__main__":
    main()
