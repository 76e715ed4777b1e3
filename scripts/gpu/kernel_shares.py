"""Profile one training step: where the GPU's time goes, by kernel and by what it is for.

A kernel whose name is in no group is "other".
"""

import re
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

GROUPS = (
    ("attention", r"flex_attention|triton_tem_|flash|fmha|attention"),
    (
        "delta rule",
        r"chunk_|recompute_w_u|wy_repr|causal_conv1d|compute_dh0|l2norm|layer_norm_gated|solve_tril|merge_16x16|"
        r"conv_depthwise|trsm|triangular",
    ),
    ("LM head, without its products", r"^_forward_kernel|^_backward_kernel"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|cublas|splitK|gemv|dot_kernel"),
    (
        "elementwise, norms, copies",
        r"elementwise|vectorized|reduce|Memcpy|Memset|CatArray|index|gather|scatter|multi_tensor|triton_(poi|red|per)_|"
        r"_rms_norm|_swiglu|_silu_mul|_rope|rotary|copy|fill|cumsum|scan|softmax",
    ),
)


def profile_step(step: Callable[[], Any], say: Callable[[str], None], *, top: int = 15) -> dict[str, Any]:
    """Run a step that was warmed up before, and print and return what it spent its time on.

    Returns:
        seconds: Of the step, profiler included.
        busy: Share of them in which a kernel ran.
        groups: Share of the kernels' time.
        kernels: The `top` longest: name, group, calls, milliseconds, share.
    """
    on_gpu = torch.cuda.is_available()
    # on a CPU, the operations: so that all of this runs there too
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        started = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    field = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = [(event, getattr(event, field) / 1000) for event in found.key_averages() if event.device_type == kind]
    total = sum(ms for _, ms in events) or 1.0
    groups: dict[str, float] = {}
    for event, ms in events:
        groups[find_group(event.key)] = groups.get(find_group(event.key), 0.0) + ms / total
    kernels = [
        {"name": event.key[:120], "group": find_group(event.key), "calls": event.count, "ms": ms, "share": ms / total}
        for event, ms in sorted(events, key=lambda pair: -pair[1])[:top]
    ]
    say(f"profile: {seconds:.2f} s, kernels {total / 1000:.2f} s of them")
    for name, share in sorted(groups.items(), key=lambda pair: -pair[1]):
        say(f"  {share:6.1%}  {name}")
    for kernel in kernels:
        say(f"  {kernel['ms']:8.1f} ms  {kernel['share']:6.1%}  {kernel['calls']:6} x  {kernel['name']}")
    return {"seconds": seconds, "busy": total / 1000 / seconds, "groups": groups, "kernels": kernels}


def find_group(name: str) -> str:
    """Return what a kernel is for, by its name."""
    return next((group for group, pattern in GROUPS if re.search(pattern, name)), "other")
