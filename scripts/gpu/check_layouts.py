#!/usr/bin/env python3
"""Check that flat layouts compute on this device what each row alone computes; exit code 1 if not.

  python scripts/gpu/check_layouts.py            # CPU or GPU, whichever there is

  python scripts/gpu/check_layouts.py --models gemma2 gemma3 gpt_oss --json FILE

Random small models, rows of odd lengths that share prefixes: log-probabilities and gradients of "packed", "tree" and
"kept" (a prefix over three passes) against the same model on each row alone with SDPA, with transformers' eager
attention where SDPA does not know the scores, and, for gated delta nets, with transformers' code in torch. In float32,
and in bfloat16 against float32 (where the row alone is as far off). On a GPU with flash-linear-attention its kernels
are what is checked: they multiply float32 in TF32 (10 bits), hence their limit.
"""

import argparse
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from fla_tuning import limit_tuning
from torch import Tensor
from trl.trainer.utils import add_fused_lm_head

from polar_trl.grpo.packing import fla_kernels
from polar_trl.grpo.packing.forward import pack_rows, prepare_model, score
from polar_trl.grpo.packing.linear_attention import computed_in_torch
from polar_trl.grpo.packing.prefix import SharedPrefix, keep_prefix

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
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
WINDOWS: dict[str, Any] = {"sliding_window": 200, "layer_types": ["sliding_attention", "full_attention"] * 2}
CAPS = {"attn_logit_softcapping": 0.1, "final_logit_softcapping": 5.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "qwen3_5": ("Qwen3_5", HYBRID),
    "mistral": ("Mistral", {"sliding_window": 200}),
    "gemma3": ("Gemma3", WINDOWS | {"head_dim": 256, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", WINDOWS | CAPS),
    "gpt_oss": ("GptOss", WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 4}),
}
EAGER = ("gemma2", "gpt_oss")
"""Models whose soft caps and sinks transformers' SDPA leaves out."""


def build_model(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    family, settings = MODELS[name]
    config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}ForCausalLM")(config(**SIZES | {"pad_token_id": 0} | settings))
    if name in EAGER:
        model.set_attn_implementation("eager")
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
    prefix, accelerator = SharedPrefix(rows[0][:KEPT]), SimpleNamespace(autocast=nullcontext, device=weights.device)
    parts = []
    weights_of = weights.split([int(mask.sum()) for mask in scored])
    for some in (slice(0, 2), slice(2, 5), slice(5, None)):
        is_read = some.stop is not None
        packed = pack_rows(
            rows[some], scored[some], kind="tree", device=weights.device, prefix=prefix, is_read=is_read
        )
        with keep_prefix(packed.layout, model, accelerator):
            logps = score(model, packed)[0]
            (logps * torch.cat(weights_of[some])).sum().backward()
        parts.append(logps.detach().float())
    return torch.cat(parts), torch.cat([p.grad.flatten().float() for p in model.parameters()])


def check(
    name: str, dtype: torch.dtype, device: torch.device, rows: list[Any], scored: list[Any]
) -> dict[str, tuple[float, float]]:
    """By layout: the largest difference of log-probabilities from float32 alone, and the gradient's relative one."""
    truth = train(build_model(name, device, torch.float32), None, rows, scored)
    model = build_model(name, device, dtype)
    found = {"alone": train(model, None, rows, scored)}
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    prepare_model(model, "tree")
    found |= {kind: train(model, kind, rows, scored) for kind in ("packed", "tree", "kept")}
    return {
        kind: ((logps - truth[0]).abs().max().item(), ((gradient - truth[1]).norm() / truth[1].norm()).item())
        for kind, (logps, gradient) in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Check flat layouts against each row alone.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path, help="write what is printed to this file too")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, scored = build_rows()
    has_fla = fla_kernels.load_kernels(device) is not None
    limit_tuning(1)
    started = time.perf_counter()
    table: list[dict[str, Any]] = []
    print("model    dtype     layout   max |difference| of log-probabilities   gradient, relative   limit   seconds")
    for name in options.models:
        hybrid = name == "qwen3_5"
        limits = {torch.float32: 2e-2 if hybrid and has_fla else 1e-4, torch.bfloat16: 0.1 if hybrid else 0.2}
        for dtype, limit in limits.items():
            try:
                found = check(name, dtype, device, rows, scored)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other models are still checked
                print(f"{name:8} {str(dtype)[6:]:9} {type(error).__name__}: {error}", flush=True)
                table.append({"model": name, "dtype": str(dtype)[6:], "error": str(error), "passed": False})
                continue
            seconds = time.perf_counter() - started
            for kind, (gap, relative) in found.items():
                passed = gap <= limit and relative <= limit
                table.append({"model": name, "dtype": str(dtype)[6:], "layout": kind, "passed": passed})
                table[-1] |= {"logps": gap, "gradient": relative, "limit": limit, "seconds": seconds}
                print(
                    f"{name:8} {str(dtype)[6:]:9} {kind:8} {gap:38.2e} {relative:20.2e} {limit:7.0e} {seconds:9.1f}",
                    flush=True,
                )
            if options.json:
                options.json.write_text(json.dumps(table, indent=1))
    failed = not all(row["passed"] for row in table)
    if "qwen3_5" in options.models:
        print(f"gated delta nets: {'flash-linear-attention' if has_fla else 'torch'}")
    print(
        "FAILED"
        if failed
        else f"as each row alone, on {torch.cuda.get_device_name() if device.type == 'cuda' else 'a CPU'}"
    )
    sys.exit(failed)


if __name__ == "__main__":
    main()
