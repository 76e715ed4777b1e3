"""Let flash-linear-attention's Triton kernels try fewer configurations before they settle on one.

All of them are over two hundred, of which each takes a second or more to compile when a process first needs it. No
measurement chooses among them: the usual configurations are left.
"""

import math
import sys
from importlib import import_module
from typing import Any

import torch

from polar_trl.grpo.packing import fla_kernels


def limit_tuning(count: int) -> int:
    """Leave each kernel so many configurations: those of 4 warps and 3 stages first, and the last one with the fewest
    stages, whose tiles are the surest to fit a card; 0 leaves all.

    Returns:
        How many kernels have fewer than before; 0 where the package is not used.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not count or fla_kernels.load_kernels(device) is None:
        return 0
    autotuner: Any = import_module("triton.runtime.autotuner").Autotuner
    limited = 0
    for module in [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "fla"]:
        for value in list(vars(module).values()):
            while value is not None and not isinstance(value, autotuner):
                value = vars(value).get("fn") if hasattr(value, "__dict__") else None
            if value is not None and len(value.configs) > count:
                value.configs = choose_configs(value.configs, count)
                limited += 1
    return limited


def choose_configs(configs: list[Any], count: int) -> list[Any]:
    """`count` of Triton's configurations."""
    usual = sorted(configs, key=lambda config: abs(math.log2(config.num_warps) - 2) + abs(config.num_stages - 3))
    surest = min(usual, key=lambda config: config.num_stages)
    return [*[config for config in usual if config is not surest][: count - 1], surest]
