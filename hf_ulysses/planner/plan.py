"""What one GPU holds: states as ZeRO-3 places them, DeepSpeed's default buffers, the measured step, a stated allowance."""

import torch

from .step import measure

GIB = 2**30
# DeepSpeed's defaults: stage3_max_live_parameters and reduce_bucket_size, in elements.
_LIVE_PARAMETERS, _REDUCE_BUCKET = 10**9, 5 * 10**8
# CUDA context and NCCL's buffers in GiB; fragmentation as a share of activations. Assumed, not measured on a GPU.
CONTEXT_GIB, FRAGMENTATION = 1.0, 0.02


def plan_zero3(config, length, sp_size, num_gpus, gpu_memory_gib, **step):
    """Peak per GPU under ZeRO-3 in bfloat16 with Adam and no offload: 2 + 2 + 12 bytes per parameter over all ranks.

    Takes `measure`'s further arguments; dtype stays bfloat16. Returns a dict of GiB: `peak_memory_gib`, `fits`, `breakdown`.
    """
    peak, model = measure(config, length, sp_size, dtype=torch.bfloat16, **step)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    share, activations = parameters / num_gpus / GIB, peak / GIB
    breakdown = {
        "parameters": 2 * share,
        "gradients": 2 * share,
        "optimizer": 12 * share,
        "activations": activations,
        "communication": 2 * (min(_LIVE_PARAMETERS, parameters) + min(_REDUCE_BUCKET, parameters)) / GIB,
        "allowance": CONTEXT_GIB + FRAGMENTATION * activations,
    }
    total = sum(breakdown.values())
    return {"peak_memory_gib": total, "fits": total <= gpu_memory_gib, "breakdown": breakdown}
