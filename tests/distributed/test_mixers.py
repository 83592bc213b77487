"""Layers that mix positions outside of attention and exchange around their scans and convolutions, forward and backward
against one process."""

import contextlib
import functools
import gc
import sys
import types
import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

import hf_ulysses

from ..collectives import Collectives
from ..models import batch_of, checkpoint, packed_positions, padded
from ..tiny_models import tiny_config, tiny_model
from .steps import assert_same, sharded, whole
from .test_exchange_cost import bench_exchange

# Delta rules and state spaces are computed in float32 by their reference code, and sums over a row are cut in pieces.
TOLERANCE = 5e-5

# The mixer's name, its convolution and its scan, as the modelling files call them.
DELTA = ("linear_attn", "causal_conv1d_fn", "torch_chunk_gated_delta_rule")
MODELS = {
    "qwen3_next": DELTA,
    "qwen3_5_text": DELTA,
    "olmo_hybrid": DELTA,
    "kimi_linear": ("self_attn", "causal_conv1d_fn", "chunk_kimi_delta_attention"),
    "lfm2": ("conv", "causal_conv1d_fn", None),
    "mamba2": ("mixer", "causal_conv1d_fn", "mamba2_chunk_scan"),
    "mamba": ("mixer", "causal_conv1d_fn", "mamba_selective_scan"),
    "jamba": ("mamba", "causal_conv1d_fn", "mamba_selective_scan"),
}
HYBRIDS = ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "lfm2"]


def rows(case):
    batch = batch_of(2, 46)
    batch["input_ids"] %= 96
    batch["labels"] = batch["input_ids"].clone()
    if case == "uneven":
        return {name: value[:, :-1] for name, value in batch.items()}
    if case == "padded left":
        return padded(batch, real=(46, 31), side="left")
    if case == "packed":
        return {**{name: value[:1] for name, value in batch.items()}, "position_ids": packed_positions(13, 9, 24)}
    if case == "shorter than the kernel":
        return {name: value[:, :7] for name, value in batch.items()}
    return batch


def build(model_type, heads=4, kv_heads=2, change=None, **config):
    configuration = tiny_config(model_type, heads, kv_heads)
    for name, value in config.items():
        setattr(configuration, name, value)
    configuration._experts_implementation = "eager"
    model = tiny_model(configuration)
    if change is not None:
        change(model)
    return model


def mixers_of(model, model_type):
    name = MODELS[model_type][0]
    return [module for path, module in model.named_modules() if path.endswith(name) and hasattr(module, "forward")]


class Spied:
    """Shapes of all tensors that a function of a modelling file is called with."""

    def __init__(self, model, model_type, name):
        self.source = sys.modules[type(model).__module__]
        self.name, self.shapes = name, []

    def __enter__(self):
        self.original = getattr(self.source, self.name)

        @functools.wraps(self.original)
        def spy(*args, **kwargs):
            self.shapes.append([tuple(v.shape) for v in (*args, *kwargs.values()) if torch.is_tensor(v)])
            return self.original(*args, **kwargs)

        self.spy = spy
        setattr(self.source, self.name, spy)
        return self

    def __exit__(self, *error):
        assert vars(self.source)[self.name] is self.spy, "detach() restores names by identity"
        setattr(self.source, self.name, self.original)


def one_process(model_type, batch, reentrant=None, **kind):
    model = build(model_type, **kind)
    if reentrant is not None:
        checkpoint(model, reentrant=reentrant)  # With True, router logits have no gradient, whoever computes them.
    return whole(model, batch)


def in_shards(model_type, batch, reentrant=None, **kind):
    model = build(model_type, **kind)
    if reentrant is not None:
        checkpoint(model, reentrant=reentrant)
    with hf_ulysses.attach(model) as sp:
        step = sharded(model, batch, sp)
        return step, sp.scans, sp.gathered


def compare(ranks, size, model_type, batch, reentrant=None, **kind):
    reference = ranks(1).run(one_process, model_type, batch, reentrant, **kind)[0]
    for step, scans, gathered in ranks(size).run(in_shards, model_type, batch, reentrant, **kind):
        assert_same(step, reference, tolerance=TOLERANCE)
        assert scans and not gathered


CASES = ["whole", "uneven", "padded left", "packed", "shorter than the kernel"]


@pytest.mark.half("size", "model_type", "case")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model_type", HYBRIDS)
@pytest.mark.parametrize("size", [2, 4])
def test_exact(ranks, size, model_type, case):
    compare(ranks, size, model_type, rows(case))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model_type", ["mamba2", "mamba", "jamba"])
def test_state_spaces(ranks, model_type, size):
    compare(ranks, size, model_type, rows("uneven"))


@pytest.mark.parametrize("heads", [(6, 3), (6, 2), (5, 1)], ids=["6 of 3", "6 of 2", "5 of 1"])
def test_heads_that_four_ranks_do_not_divide(ranks, heads):
    """Keys are shared unevenly, or by more ranks than there are of them."""
    compare(ranks, 4, "qwen3_next", rows("uneven"), heads=heads[0], kv_heads=heads[1])


def test_fewer_heads_than_ranks_scan_the_row(ranks):
    compare(ranks, 4, "qwen3_next", rows("uneven"), linear_num_value_heads=2)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("model_type", [*MODELS, "minimax", "bamba", "rwkv", "xlstm"])
def test_gradient_checkpointing(ranks, model_type, reentrant):
    compare(ranks, 2, model_type, rows("uneven"), reentrant)


# -- what each rank does ----------------------------------------------------------------------------------------------


def shapes(model_type, batch, attached):
    """Of the scan's and the convolution's arguments in one step, and the matrix products of the step."""
    model = build(model_type)
    _, conv, scan = MODELS[model_type]
    with Spied(model, model_type, conv) as convs, Spied(model, model_type, scan or conv) as scans:
        if not attached:
            with FlopCounterMode(display=False) as flops:
                whole(model, batch)
            return convs.shapes, scans.shapes, flops.get_total_flops()
        with hf_ulysses.attach(model) as sp:
            sp.shard(batch)
            del convs.shapes[:], scans.shapes[:]
            with FlopCounterMode(display=False) as flops:
                sharded(model, batch, sp)
        return convs.shapes, scans.shapes, flops.get_total_flops()


@pytest.mark.parametrize("model_type", ["qwen3_next", "olmo_hybrid", "kimi_linear", "mamba2"])
def test_a_rank_scans_the_row_for_its_heads(ranks, model_type):
    batch, size = rows("whole"), 2
    convs, scans, flops = ranks(1).run(shapes, model_type, batch, False)[0]
    for my_convs, my_scans, my_flops in ranks(size).run(shapes, model_type, batch, True):
        assert len(my_scans) == len(scans) > 0 and len(my_convs) == len(convs) > 0
        value, mine = scans[0][2 if model_type != "mamba2" else 0], my_scans[0][2 if model_type != "mamba2" else 0]
        assert mine == (value[0], 46, value[2] // size, value[3])
        reach = convs[0][1][-1] - 1
        assert my_convs[0][0] == (*convs[0][0][:2], 46 // size + reach)
        assert my_flops <= 1.1 * flops / size  # Chunks of 64, and three positions more in front of the convolution.


def collectives(model_type):
    """Of one layer, forward and backward."""
    model = build(model_type)
    with hf_ulysses.attach(model) as sp:
        part = sp.shard(rows("uneven"))
        (layer,) = mixers_of(model, model_type)
        counts = []

        def count(module, args, kwargs):
            if not counts:
                counts.append(None)
                args = [arg.detach().requires_grad_() if torch.is_tensor(arg) else arg for arg in args]
                kwargs = {k: v.detach().requires_grad_() if k == "hidden_states" else v for k, v in kwargs.items()}
                with torch.enable_grad(), Collectives() as forward:
                    output = module(*args, **kwargs)
                with Collectives() as backward:
                    output.sum().backward()
                counts[:] = [forward.counts, backward.counts]

        layer.register_forward_pre_hook(count, with_kwargs=True, prepend=True)
        model(**part)
        return counts


def test_collectives_of_a_layer(ranks):
    """The convolution's halo, the scan's arguments in one dtype, its output; the same in backward."""
    for forward, backward in ranks(2).run(collectives, "olmo_hybrid"):
        assert forward == {"_allgather_base_": 1, "alltoall_base_": 2}
        assert backward == {"alltoall_base_": 3}


def peak(layers, attached, checkpointing=False, change=None):
    """Of live storage in one step of a model whose layers are all delta nets."""
    config = dict(layer_types=["linear_attention"] * layers, num_hidden_layers=layers)
    model = build("olmo_hybrid", change=change, **config)
    batch = batch_of(1, 512)
    batch["labels"] = batch["input_ids"] = batch["input_ids"] % 96
    if checkpointing:
        checkpoint(model)
    storage = bench_exchange().LiveStorage()
    try:
        with hf_ulysses.attach(model) if attached else contextlib.nullcontext() as sp:
            part = sp.shard(batch) if attached else {**batch, "use_cache": False}
            model(**part).loss.backward()
            model.zero_grad(set_to_none=False)
            with storage:
                model(**part).loss.backward()
            assert not attached or not sp.gathered
    finally:
        if change is not None:
            model.undo()
    return storage.peak


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_a_rank_holds_its_part_of_the_activations(ranks, checkpointing):
    whole_row = ranks(1).run(peak, 4, False, checkpointing)[0]
    assert max(ranks(2).run(peak, 4, True, checkpointing)) < 0.55 * whole_row


# -- documents --------------------------------------------------------------------------------------------------------


def keep_documents_apart(model):
    """Kernels as on a GPU: the scan starts again where `cu_seqlens` says so, the convolution where `seq_idx` does."""
    source = sys.modules[type(model).__module__]
    scan, conv = source.torch_chunk_gated_delta_rule, source.causal_conv1d_fn

    def scan_documents(*args, cu_seqlens=None, **kwargs):
        if cu_seqlens is None:
            return scan(*args, **kwargs)
        assert cu_seqlens[-1] == args[0].shape[1]
        parts = []
        for start, stop in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]):
            part = [a[:, start:stop] if torch.is_tensor(a) else a for a in args]
            named = {k: v[:, start:stop] if k in ("g", "beta") else v for k, v in kwargs.items()}
            named = {k: v for k, v in named.items() if not k.startswith(("cu_", "max_", "seq_"))}
            parts.append(scan(*part, **named)[0])
        return torch.cat(parts, 1), None

    def conv_documents(hidden_states, weight, bias=None, activation=None, seq_idx=None, **kwargs):
        if seq_idx is None:
            return conv(hidden_states, weight, bias, activation)
        assert seq_idx.shape[1] == hidden_states.shape[2]
        out = torch.zeros_like(hidden_states)
        for document in seq_idx.unique():
            here = (seq_idx == document)[:, None]
            out = out + conv(hidden_states * here, weight, bias, activation) * here
        return out

    source.torch_chunk_gated_delta_rule, source.causal_conv1d_fn = scan_documents, conv_documents
    model.undo = lambda: vars(source).update(torch_chunk_gated_delta_rule=scan, causal_conv1d_fn=conv)


def with_documents(batch, attached):
    model = build("qwen3_next", change=keep_documents_apart)
    try:
        if not attached:
            return whole(model, batch)
        with hf_ulysses.attach(model) as sp:
            step = sharded(model, batch, sp)
            assert sp.scans and not sp.gathered
        return step
    finally:
        model.undo()


@pytest.mark.parametrize("length", [46, 45], ids=["even", "uneven"])
def test_boundaries_reach_the_scan_and_the_convolution(ranks, length):
    documents = (13, 9, length - 22)
    ends = torch.tensor([0, 13, 22, length], dtype=torch.int32)
    batch = {name: value[:1, :length] for name, value in rows("whole").items()}
    batch.update(position_ids=packed_positions(*documents), cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    batch.update(max_length_q=max(documents), max_length_k=max(documents))
    batch["seq_idx"] = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(documents)])[None]
    reference = ranks(1).run(with_documents, batch, False)[0]
    assert_same(ranks(2).run(with_documents, batch, True), reference, tolerance=TOLERANCE)


def closed_convolution(model):
    """Convolutions that look at nothing but their own position, today."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Conv1d):
                module.weight[..., :-1] = 0


def opened_after_discovery(batch, attached):
    model = build("qwen3_next", change=closed_convolution)
    opened = build("qwen3_next").state_dict()
    if not attached:
        model.load_state_dict(opened)
        return whole(model, batch)
    with hf_ulysses.attach(model) as sp:
        sp.shard(batch)
        model.load_state_dict(opened)
        return sharded(model, batch, sp)


def test_what_the_weights_do_not_show_yet(ranks):
    """The convolution would not show in the numbers of the first row, and it is found all the same."""
    reference = ranks(1).run(opened_after_discovery, rows("uneven"), False)[0]
    assert_same(ranks(2).run(opened_after_discovery, rows("uneven"), True), reference, tolerance=TOLERANCE)


# -- functions and convolutions that a module holds --------------------------------------------------------------------


class Holding(torch.nn.Module):
    """A delta net as of transformers 5.0 and of remote code: functions as attributes, the convolution a module."""

    def __init__(self, inner, source):
        super().__init__()
        self.inner_dim, self.heads = 64, 4
        self.qkv = torch.nn.Linear(64, 3 * 64)
        self.gates = torch.nn.Linear(64, 2 * self.heads)
        self.conv1d = torch.nn.Conv1d(192, 192, 4, groups=192, padding=3)
        self.chunk_rule = source.torch_chunk_gated_delta_rule
        self.out = torch.nn.Linear(64, 64)

    def forward(self, hidden_states, **kwargs):
        length = hidden_states.shape[1]
        mixed = self.conv1d(self.qkv(hidden_states).transpose(1, 2))[..., :length].transpose(1, 2)
        q, k, v = (part.unflatten(-1, (self.heads, 16)) for part in mixed.chunk(3, -1))
        g, beta = self.gates(hidden_states).chunk(2, -1)
        out, _ = self.chunk_rule(q, k, v, g=-g.exp(), beta=beta.sigmoid(), use_qk_l2norm_in_kernel=True)
        return self.out(out.flatten(2))


def hold_functions(model):
    torch.manual_seed(3)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn = Holding(layer.linear_attn, sys.modules[type(model).__module__])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", ["uneven", "shorter than the kernel"])
def test_functions_that_a_module_holds(ranks, size, case):
    compare(ranks, size, "qwen3_next", rows(case), change=hold_functions)


class Fused(Holding):
    """As state space layers on a GPU: in training one kernel does it all, if it is installed."""

    def __init__(self, inner, source):
        super().__init__(inner, source)
        self.everything = lambda hidden_states, slowly, **kwargs: slowly(hidden_states)

    def forward(self, hidden_states, **kwargs):
        if self.training and (done := self.everything(hidden_states, super().forward)) is not None:
            return done
        return super().forward(hidden_states)


def fuse(model):
    torch.manual_seed(3)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn = Fused(layer.linear_attn, sys.modules[type(model).__module__])


def test_a_kernel_that_does_everything_is_declined(ranks):
    compare(ranks, 2, "qwen3_next", rows("uneven"), change=fuse)


# -- engines ----------------------------------------------------------------------------------------------------------


def in_fsdp2(model_type, batch, reentrant):
    model = build(model_type)
    if reentrant is not None:
        checkpoint(model, reentrant=reentrant)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with hf_ulysses.attach(model) as sp:
        part = sp.shard(batch)
        sp.reduce_loss(model(**part).loss, part["shift_labels"]).backward()
        assert sp.scans and not sp.gathered
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("model_type", ["olmo_hybrid", "lfm2"])
def test_fsdp2(ranks, model_type, reentrant):
    reference = ranks(1).run(one_process, model_type, rows("uneven"))[0].gradients
    for gradients in ranks(2).run(in_fsdp2, model_type, rows("uneven"), reentrant):
        assert gradients.keys() == reference.keys()
        for name, expected in reference.items():
            assert (gradients[name] - expected).abs().max() <= TOLERANCE * expected.abs().max(), name


def dropped():
    """A mixer that holds a method of its own, and a model that nobody holds any more."""
    model = build("qwen3_next")
    mixer = mixers_of(model, "qwen3_next")[0]
    mixer.describe = types.MethodType(lambda self: type(self).__name__, mixer)
    alive = weakref.ref(mixer)
    sp = hf_ulysses.attach(model)
    model(**sp.shard(rows("uneven")))
    assert sp.scans
    del model, mixer, sp
    gc.collect()
    return alive() is None


def test_a_dropped_model_takes_its_mixers_along(ranks):
    assert all(ranks(2).run(dropped))
