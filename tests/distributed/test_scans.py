"""Every spec against the function on one process: outputs and all gradients, in float64, over even and uneven heads."""

import importlib
import math
import types

import pytest
import torch
import torch.distributed as dist

from hf_ulysses.core.heads import share_heads
from hf_ulysses.core.sequence import Row, holding
from hf_ulysses.mixing import scans
from hf_ulysses.mixing.specs import Place, spec_of

from ..collectives import Collectives
from ..one_architecture import try_architecture

B, LENGTH, H, G = 2, 23, 6, 2
# Sums over a row and over ranks are taken in another order; nothing else differs.
TOLERANCE = 1e-12
BSHD, BSGD, BSH, BDS = (B, LENGTH, H, 4), (B, LENGTH, G, 4), (B, LENGTH, H), (B, 2 * H, LENGTH)
# Three groups of three heads, of which ranks get parts.
BSTD = (B, LENGTH, 3, 4)

# The module that has it, the function, shapes of its arguments.
FUNCTIONS = {
    "conv": ("mamba2", "causal_conv1d_fn", dict(hidden_states=BDS, weight=(2 * H, 4), bias=(2 * H,))),
    "delta": ("qwen3_next", "torch_chunk_gated_delta_rule", dict(query=BSHD, key=BSHD, value=BSHD, g=BSH, beta=BSH)),
    "delta, shared keys": (
        "qwen3_5", "torch_chunk_gated_delta_rule", dict(query=BSGD, key=BSGD, value=BSHD, g=BSH, beta=BSH),
    ),
    "recurrent delta": (
        "olmo_hybrid", "torch_recurrent_gated_delta_rule", dict(query=BSHD, key=BSHD, value=BSHD, g=BSH, beta=BSH),
    ),
    "kda": ("kimi_linear", "chunk_kimi_delta_attention", dict(query=BSHD, key=BSHD, value=BSHD, g=BSHD, beta=BSH)),
    "mamba": (
        "mamba", "mamba_selective_scan",
        dict(hidden_states=BDS, dt=BDS, A=(2 * H, 3), B=(B, 3, LENGTH), C=(B, 3, LENGTH), D=(2 * H,), z=BDS, delta_bias=(2 * H,)),
    ),
    "mamba2": (
        "mamba2", "mamba2_chunk_scan", dict(hidden_states=BSHD, dt=BSH, A=(H,), B=BSGD, C=BSGD, D=(H,), dt_bias=(H,)),
    ),
    "mamba2, straddling groups": (
        "mamba2", "mamba2_chunk_scan",
        dict(hidden_states=(B, LENGTH, 9, 4), dt=(B, LENGTH, 9), A=(9,), B=BSTD, C=BSTD, D=(9,), dt_bias=(9,)),
    ),
    "rwkv": ("rwkv", "rwkv_linear_attention", dict(time_decay=(H,), time_first=(H,), key=BSH, value=BSH)),
}  # fmt: skip
OPTIONS = {"mamba": dict(delta_softplus=True), "mamba2": dict(dt_softplus=True, chunk_size=16)}


class Double:
    """torch, for a modelling file that computes in float32 whatever it is given."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def function_of(case):
    model, name, shapes = FUNCTIONS[case]
    source = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    shared = {k for k, shape in shapes.items() if shape == BSGD and case.startswith("delta")}
    function = getattr(source, name)
    if not shared:
        return source, name, function

    def repeating(query, key, value, g, beta, **kwargs):
        groups = value.shape[2] // query.shape[2]
        return function(query.repeat_interleave(groups, 2), key.repeat_interleave(groups, 2), value, g, beta, **kwargs)

    return source, name, repeating


def run(case, function, source, inputs):
    original, to_float = source.torch, torch.Tensor.float
    source.torch, torch.Tensor.float = Double(), torch.Tensor.double
    try:
        output = function(**inputs, **OPTIONS.get(case.partition(",")[0], {}))
    finally:
        source.torch, torch.Tensor.float = original, to_float
    return output if torch.is_tensor(output) else output[0]


def inputs_of(case):
    generator = torch.Generator().manual_seed(3)
    made = {}
    for name, shape in FUNCTIONS[case][2].items():
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
        made[name] = -tensor.abs() if name in ("g", "A") else tensor / 2
    return made


def whole_row(case):
    source, _, function = function_of(case)
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs_of(case).items()}
    output = run(case, function, source, inputs)
    output.backward(torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape))
    return output.detach(), {name: tensor.grad for name, tensor in inputs.items()}


class Attached:
    def __init__(self):
        self.group, self.scans = dist.group.WORLD, 0
        self.rank, self.size = dist.get_rank(), dist.get_world_size()


def row_of(attached, length=LENGTH, boundaries=None):
    padded = -(-length // attached.size) * attached.size
    row = Row(length, padded, torch.arange(padded)[None], None, boundaries or {}, None)
    row.attachment = attached
    return row


def shard(tensor, dim, row, attached):
    shape = list(tensor.shape)
    shape[dim] = row.padded - shape[dim]
    part = row.padded // attached.size
    full = torch.cat([tensor, tensor.new_zeros(shape)], dim)
    return full.narrow(dim, attached.rank * part, part).clone()


def in_shards(case, wrapped_module=False):
    source, name, function = function_of(case)
    attached, seen = Attached(), []
    row = row_of(attached)

    def spied(*args, **kwargs):
        seen.append({k: tuple(v.shape) for k, v in kwargs.items() if torch.is_tensor(v)})
        return function(*args, **kwargs)

    spied.__wrapped__, spied.__name__ = function, name
    module = torch.nn.Module()
    if wrapped_module:
        module.add_module(name, kernel_module(spied, name))
    else:
        setattr(module, name, spied)
    before = dict(vars(module))
    spec = spec_of({name}, ())
    handles = scans.attach([module])
    assert len(handles) == 1
    places = {n: spec.places.get(n, Place(None)) for n in FUNCTIONS[case][2]}
    inputs = {
        n: (t if places[n].sequence is None else shard(t, places[n].sequence, row, attached)).requires_grad_()
        for n, t in inputs_of(case).items()
    }
    with Collectives() as counted:
        with holding(row):
            output = run(case, getattr(module, name), source, inputs)
        dim = spec.output.sequence
        expected, gradients = whole_row(case)
        weights = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view(expected.shape)
        output.backward(shard(weights, dim, row, attached))
    real = shard(torch.ones_like(expected), dim, row, attached)
    assert_close(output.detach() * real, shard(expected, dim, row, attached), "output")
    for n, tensor in inputs.items():
        if places[n].sequence is None:
            total = tensor.grad.clone()
            dist.all_reduce(total)
            assert_close(total, gradients[n], n)
        else:
            assert_close(tensor.grad, shard(gradients[n], places[n].sequence, row, attached), n)
    assert attached.scans == 1
    for handle in handles:
        handle.remove()
    assert vars(module) == before
    return seen[0], counted.counts, sum(counted.sent)


def assert_close(found, expected, what):
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1), what


def kernel_module(function, name):
    """As `kernels` makes one of a decorated function: the signature is gone."""

    def forward(self, *args, **kwargs):
        return function(*args, **kwargs)

    return type(name, (torch.nn.Module,), {"forward": forward})()


@pytest.mark.parametrize("wrapped", [False, True], ids=["function", "kernels"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", FUNCTIONS)
def test_exact(ranks, case, size, wrapped):
    for rank, (shapes, counts, sent) in enumerate(ranks(size).run(in_shards, case, wrapped)):
        name = next(n for n in ("value", "hidden_states") if n in shapes)
        full = FUNCTIONS[case][2][name]
        if case == "conv":
            part = -(-LENGTH // size)
            assert shapes[name] == (*full[:2], part + 3)
            assert counts == {"_allgather_base_": 1, "alltoall_base_": 1}
            continue
        heads = 1 if case == "mamba" else 2
        kv_heads = min([shape[2] for shape in FUNCTIONS[case][2].values() if len(shape) == 4], default=full[heads])
        expected = share_heads(full[heads], kv_heads, size)[rank].num_query
        assert shapes[name] == tuple(expected if dim == heads else n for dim, n in enumerate(full)), shapes
        assert counts["alltoall_base_"] == (6 if case == "mamba" else 4)
        if kv_heads == full[heads] and full[heads] % size == 0 and case != "mamba":
            # What has a sequence goes there and its gradient back; all but what stays on the rank.
            numbers = sum(math.prod(shape) for shape in (*FUNCTIONS[case][2].values(), full) if LENGTH in shape)
            part = numbers // LENGTH * -(-LENGTH // size)
            assert sent == 2 * 8 * part * (size - 1) // size


# -- what is refused, declined, and done on the whole row -------------------------------------------------------------


def module_with(name, function):
    module = torch.nn.Module()
    setattr(module, name, function)
    return module


def call(name, function, *args, length=16, boundaries=None, **kwargs):
    attached = Attached()
    module = module_with(name, function)
    scans.attach([module])
    with holding(row_of(attached, length, boundaries)):
        return getattr(module, name)(*args, **kwargs)


def delta(query, key, value, g, beta, initial_state=None, cu_seqlens=None, **kwargs):
    """What `documents` says is read, heads kept apart."""
    seen = cu_seqlens.tolist() if cu_seqlens is not None else None
    delta.seen = query.shape, seen
    return value.cumsum(1), None


def tensors(size, heads=4):
    x = torch.ones(1, 16 // size, heads, 2, dtype=torch.float64)
    return x, x, x, x[..., 0], x[..., 0]


def refused():
    size = dist.get_world_size()
    with pytest.raises(ValueError, match="initial_state of shape"):
        call("chunk_gated_delta_rule", delta, *tensors(size), initial_state=torch.zeros(1, 4, 2, 2))
    with pytest.raises(ValueError, match=r"something of shape .*not known"):
        call("chunk_gated_delta_rule", delta, *tensors(size), something=torch.zeros(1, 16 // size))
    x = torch.ones(1, 5, 4, 2)
    with pytest.raises(ValueError, match="got query of shape"):
        call("chunk_gated_delta_rule", delta, x, x, x, x[..., 0], x[..., 0])


def test_what_is_not_known_is_refused_by_name(ranks):
    ranks(2).run(refused)


def boundaries():
    size = dist.get_world_size()
    ends = torch.tensor([0, 5, 16])
    row = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    out, _ = call("chunk_gated_delta_rule", delta, *tensors(size), boundaries=row, cu_seqlens=None)
    assert delta.seen == ((1, 16, 4 // size, 2), [0, 5, 16])
    assert out[0, 0, 0, 0] == 1 + dist.get_rank() * 16 // size
    # Fewer heads than ranks: all of the row.
    out, _ = call("chunk_gated_delta_rule", delta, *tensors(size, heads=1))
    assert delta.seen[0] == (1, 16, 1, 2) and out.shape == (1, 16 // size, 1, 2)

    def conv(x, weight, bias=None, seq_idx=None, activation=None):
        assert x.shape == (1, 3, 16) and seq_idx.shape == (1, 16)
        return x * seq_idx[:, None]

    part, start = 16 // size, dist.get_rank() * 16 // size
    documents = torch.arange(16)[None] // 5
    x = torch.ones(1, 3, part)
    out = call("causal_conv1d_fn", conv, x, torch.ones(3, 4), seq_idx=documents[:, start : start + part])
    assert out[0, 0].tolist() == documents[0, start : start + part].tolist()


def test_documents_and_few_heads(ranks):
    ranks(2).run(boundaries)


def declined():
    def fused(zxbcdt, weight):
        return zxbcdt

    assert call("mamba_split_conv1d_scan_combined", fused, torch.ones(1, 8, 2), None) is None
    module, attached = module_with("causal_conv1d_fn", lambda x, weight: x), Attached()
    scans.attach([module])
    x = torch.ones(1, 2, 8)
    assert module.causal_conv1d_fn(x, torch.ones(2, 4)) is x, "outside of a sharded forward"
    with holding(row_of(attached)), holding(None):
        assert module.causal_conv1d_fn(x, torch.ones(2, 4)) is x, "in a module on the whole row"
    assert attached.scans == 0


def test_fused_kernels_are_declined_and_nothing_happens_outside(ranks):
    ranks(2).run(declined)


def convolutions():
    """A `Conv1d` that pads both ends, and shards shorter than it reaches back."""
    attached = Attached()
    conv = torch.nn.Conv1d(2, 2, 4, padding=3, dtype=torch.float64)
    x = torch.randn(1, 2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for p in conv.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape))
    expected = conv(x)[..., :7]
    scans.attach([conv])
    row = row_of(attached, 7)
    part = shard(x, -1, row, attached)
    with holding(row):
        found = conv(part)[..., : part.shape[-1]]
    real = shard(torch.ones_like(expected), -1, row, attached)
    assert_close((found * real).detach(), shard(expected, -1, row, attached).detach(), "a Conv1d")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_convolutions_that_pad_both_ends(ranks, size):
    ranks(size).run(convolutions)


# -- models -----------------------------------------------------------------------------------------------------------

MODELS = """qwen3_next qwen3_5_text olmo_hybrid kimi_linear bamba falcon_h1 falcon_mamba granitemoehybrid jamba lfm2 mamba
mamba2 nemotron_h zamba zamba2 bailing_hybrid minimax rwkv xlstm""".split()


def kernels_everywhere(model_type):
    """Decorated functions as `kernels` leaves them: module instances in the modelling file."""
    name = model_type.removesuffix("_text")
    source = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    originals = {}
    for key, value in list(vars(source).items()):
        if isinstance(value, types.FunctionType) and spec_of({key}, scans._parameters(value)) is not None:
            originals[key] = value
            setattr(source, key, kernel_module(value, value.__name__))
    return source, originals


def try_model(model_type, heads, kv_heads, kernels):
    source, originals = kernels_everywhere(model_type) if kernels else (None, {})
    try:
        return try_architecture(model_type, heads, kv_heads)
    finally:
        vars(source).update(originals) if source is not None else None


@pytest.mark.half("size", "model_type")
@pytest.mark.parametrize("size, heads, kv_heads, kernels", [(2, 4, 2, False), (4, 6, 3, False), (2, 4, 2, True)])
@pytest.mark.parametrize("model_type", MODELS)
def test_models(ranks, model_type, size, heads, kv_heads, kernels):
    for found in ranks(size).run(try_model, model_type, heads, kv_heads, kernels):
        for case in ("unpacked", "packed", "left_padded"):
            assert found[case]["status"] in ("exact", "impossible"), found
        assert found["unpacked"]["status"] == "exact" and found["unpacked"]["scans"] > 0, found
        assert not found["unpacked"]["gathered"], found
