"""Have accelerate set up FSDP or DeepSpeed on processes without GPUs."""

import os
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType


def configure_sharding() -> dict[str, Any]:
    """Set accelerate's state up as its launcher asks; return the settings of training arguments that go with it.

    accelerate reads the settings of FSDP and DeepSpeed only where it found GPUs. That one answer is given here, and
    all that follows is its own; without it, these processes would train with DistributedDataParallel and say nothing.
    With DeepSpeed, accelerate takes "use the CPU" for "without DeepSpeed"; there is nothing else here.
    """
    is_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if not is_deepspeed and os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return {"use_cpu": True}
    if is_deepspeed:
        import deepspeed

        # a reduction in shared memory, which takes a C++ compiler half a minute; gloo has one
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    PartialState(cpu=True)
    found = DistributedType.DEEPSPEED if is_deepspeed else DistributedType.MULTI_GPU
    PartialState._shared_state["distributed_type"] = found
    return {"use_cpu": not is_deepspeed, "accelerator_config": {"use_configured_state": True}}
