"""What is known of the functions that mix positions in published models: one `Spec` each, matched by name and parameters.

A spec says where an argument has its sequence and its heads (or channels); nothing about models. Kernels of `fla`,
`mamba_ssm`, `causal_conv1d` and `kernels` and transformers' own fallbacks take the same arguments in the same order under two sets
of names, "query|q". A new function: a line here and one in tests/distributed/test_scans.py.
"""

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Place:
    """Dimensions of a tensor: where it has the sequence, where the heads; `None`: not at all. `dims`: how many, if it matters."""

    sequence: int | None
    heads: int | None = None
    dims: int | None = None


@dataclass(frozen=True)
class Spec:
    """How one function is split over ranks.

    Args:
        names (`str`): a regular expression of the names it goes by.
        order (`str`): its leading parameters, in order; for wrappers that hide them. The first is required.
        places (`dict`): parameter -> `Place`. Tensors with fewer heads than `heads_of` has share them (GQA, Mamba 2's groups).
        output (`Place`): of the first tensor it returns.
        heads_of (`str`): the argument whose heads are counted; "" where positions before the shard are all it needs.
        way (`str`): "heads", "halo", or "decline": it returns `None`, as kernels that are not installed do.
    """

    names: str
    order: str
    places: dict = field(default_factory=dict)
    output: Place | None = None
    heads_of: str = ""
    way: str = "heads"

    def parameter(self, name):
        """The name by which `places` knows a parameter, or the name itself."""
        return next((known.split("|")[0] for known in self.order.split() if name in known.split("|")), name)

    def positional(self):
        return [known.split("|")[0] for known in self.order.split()]

    def takes(self, parameters):
        """Whether a function with these parameters is meant; `()`: a wrapper that hides them."""
        if not parameters:
            return True
        known = [self.parameter(name) for name in parameters]
        return known[: len(self.required)] == self.required

    @property
    def required(self):
        return self.positional()[: 1 if self.way == "decline" else 2 if self.way == "halo" else 4]


# Batch, sequence, heads, size; the same without a size; a parameter of each head.
_BSHD, _BSH, _H = Place(1, 2), Place(1, 2), Place(None, 0)
_BHSD, _BDS, _BNS = Place(2, 1), Place(2, 1), Place(2, dims=3)
_SEQ = {"seq_idx": Place(1)}
_DELTA = {"query": _BSHD, "key": _BSHD, "value": _BSHD, "g": _BSH, "beta": _BSH, "A_log": _H, "dt_bias": _H, "g_gamma": _H}

SPECS = (
    Spec(
        r"causal_conv1d_fn", "hidden_states|x weight bias",
        {"hidden_states": _BNS, "weight": _H, "bias": _H, **_SEQ}, _BNS, way="halo",
    ),
    Spec(
        r"(torch_)?(chunk|(fused_)?recurrent)_(gated_)?delta_rule|(chunk|(fused_)?recurrent)_(kda|kimi_delta_attention)",
        "query|q key|k value|v g beta", _DELTA, _BSHD, "value",
    ),
    Spec(
        r"(chunk|fused_recurrent)_(simple_gla|gla|retention|linear_attn)", "query|q key|k value|v g|gk",
        _DELTA, _BSHD, "value",
    ),
    Spec(
        r"mamba_selective_scan|selective_scan_fn", "hidden_states|u dt|delta A B C D z delta_bias delta_softplus",
        {"hidden_states": _BDS, "dt": _BDS, "A": _H, "B": _BNS, "C": _BNS, "D": _H, "z": _BDS, "delta_bias": _H},
        _BDS, "hidden_states",
    ),
    Spec(
        r"mamba2_chunk_scan|mamba_chunk_scan_combined", "hidden_states|x dt A B C chunk_size D z dt_bias initial_states",
        {"hidden_states": _BSHD, "dt": _BSH, "A": _H, "B": _BSHD, "C": _BSHD, "D": _H, "z": _BSHD, "dt_bias": _H, **_SEQ},
        _BSHD, "hidden_states",
    ),
    Spec(
        r"(lightning_attention|lightning_attn_func|lightning_attn\w*)", "query|q key|k value|v slope_rate|s|slopes",
        {"query": _BHSD, "key": _BHSD, "value": _BHSD, "slope_rate": _H}, _BHSD, "value",
    ),
    Spec(
        r"rwkv_linear_attention(_cpu)?", "time_decay time_first key value",
        {"time_decay": _H, "time_first": _H, "key": _BSH, "value": _BSH}, _BSH, "value",
    ),
    Spec(
        r"(chunk|fused_recurrent)_rwkv6", "r|q k v w u",
        {"r": _BSHD, "k": _BSHD, "v": _BSHD, "w": _BSHD, "u": _H}, _BSHD, "v",
    ),
    Spec(
        r"mlstm_backend", "query|q key|k value|v igate|i fgate|f",
        {"query": _BHSD, "key": _BHSD, "value": _BHSD, "igate": Place(2, 1), "fgate": Place(2, 1)}, _BHSD, "value",
    ),
    # Everything in one kernel, projections included: what they do without it can be split.
    Spec(r"mamba2?_split_conv1d_scan_combined", "zxbcdt", way="decline"),
    Spec(r"mamba_inner_fn", "xz", way="decline"),
)  # fmt: skip


def spec_of(names, parameters):
    """The spec of a function known by one of `names` with these parameters, or `None`."""
    return next(
        (spec for spec in SPECS if any(re.fullmatch(spec.names, n) for n in names) and spec.takes(parameters)), None
    )
