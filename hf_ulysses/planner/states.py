"""What an engine keeps on every GPU and in host memory beside the step's own tensors, in bytes.

Argued from the engines' sources, per parameter; `w` is the size of the weights' dtype, N the number of GPUs:

    ddp     weights w, gradients w, the reducer's buckets w (`gradient_as_bucket_view=False`), Adam 2w: torch's AdamW has
            the weights' dtype
    zero0   weights w, gradients w, Adam and float32 copies 12 (DeepSpeed's bf16 wrapper)
    zero1/2 weights w; gradients w, of ZeRO-2 w / N; 12 / N
    zero3   weights w / N; gradients w / N (`grad_partitions_flat_buffer`, in the weights' dtype); 12 / N
    fsdp2   float32: weights, gradients and Adam 16 / N (accelerate upcasts what is trained under mixed precision)

Offloaded: Adam, its float32 copies and float32 gradients beside those of the weights' dtype, 12 + 4 + w, pinned.

Gathered and reduced, DeepSpeed: `stage3_max_live_parameters` 1e9 (it keeps what comes again within
`stage3_max_reuse_distance` 1e9, so that where forward turns into backward that many are there) and `reduce_bucket_size` 5e8
(allocated whole). An Accelerate YAML leaves both at these defaults. FSDP2, in bfloat16: embeddings and head, which are not resharded, with
their gradients; the layer that computes, the one gathered ahead, a layer's gradients, and the input of their
reduce-scatter. A step of DeepSpeed's optimizer copies gradients to float32, at most `sub_group_size` 1e9 at a time (ZeRO-3),
when activations are gone.
"""

from dataclasses import dataclass

import torch

ENGINES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")
LIVE_PARAMETERS, REDUCE_BUCKET, SUB_GROUP = 10**9, 5 * 10**8, 10**9


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters: all, those that are trained, and of both those of the largest layer and those of no layer."""

    total: int
    trained: int
    layer: int
    layer_trained: int
    outside: int
    outside_trained: int


@dataclass(frozen=True)
class States:
    """Bytes on every GPU; `host` in host memory for every GPU; `step`: while the optimizer steps, without activations."""

    parameters: float
    gradients: float
    optimizer: float
    kept: float
    gathered: float
    step: float
    host: float


def sizes_of(model, layers) -> Sizes:
    def count(modules):
        found = {id(p): p for module in modules for p in module.parameters()}.values()
        return sum(p.numel() for p in found), sum(p.numel() for p in found if p.requires_grad)

    total = count([model])
    # The towers' layers, too.
    inside = count([layer for found in model.modules() if isinstance(found, torch.nn.ModuleList) for layer in found])
    layer = max((count([layer]) for layer in layers), default=(0, 0))
    return Sizes(*total, *layer, total[0] - inside[0], total[1] - inside[1])


def states_of(engine, sizes, num_gpus, bytes_each, offload_optimizer=False, offload_params=False, reference=False) -> States:
    """See the module's docstring. `reference`: a second model that is only asked (DPO), placed as the first."""
    if engine == "fsdp2":
        return _fsdp2(sizes, num_gpus, offload_params or offload_optimizer, reference)
    w, total, trained = bytes_each, sizes.total, sizes.trained
    if engine == "ddp":
        return States(w * total * (1 + reference), w * trained, 2 * w * trained, w * trained, 0, 0, 0)
    stage = int(engine[-1])
    over = [1 if stage < least else num_gpus for least in (1, 2, 3)]
    parameters, gradients = w * total * (1 + reference) / over[2], w * trained / over[1]
    optimizer, host = 12 * trained / over[0], 0.0
    step = (4 + w) * min(trained / over[0], SUB_GROUP if stage == 3 else trained)
    bucket = w * (REDUCE_BUCKET if stage else min(REDUCE_BUCKET, trained))
    if offload_optimizer and stage:
        host += (12 + 4 + w) * trained / over[0]
        # ZeRO-1 keeps whole gradients on the GPU until the step.
        gradients, optimizer, step = gradients if stage == 1 else 0, 0, 0
    if offload_params and stage == 3:
        host, parameters = host + parameters, 0
    live = w * min(LIVE_PARAMETERS, total) if stage == 3 else 0
    return States(parameters, gradients, optimizer, bucket, live, step, host)


def _fsdp2(sizes, num_gpus, offload, reference):
    parameters = (4 * sizes.trained + 2 * (sizes.total - sizes.trained) + 2 * sizes.total * reference) / num_gpus
    gradients, optimizer = 4 * sizes.trained / num_gpus, 8 * sizes.trained / num_gpus
    gathered = 2 * (sizes.outside + sizes.outside_trained + 2 * sizes.layer + 2 * sizes.layer_trained)
    if offload:
        return States(0, 0, 0, 0, gathered, 0, parameters + gradients + optimizer)
    return States(parameters, gradients, optimizer, 0, gathered, 0, 0)
