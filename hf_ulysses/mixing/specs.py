"""What is known of the functions that mix positions in published models: one `Spec` each, matched by name and parameters.

A spec says where an argument has its sequence and its heads (or channels); nothing about models. Kernels of `fla`,
`mamba_ssm`, `causal_conv1d` and `kernels` and transformers' own fallbacks take the same arguments in the same order under two sets
of names, "query|q". A new function: a line here and one in tests/distributed/test_scans.py.
"""

import functools
import re
from typing import NamedTuple


class Place(NamedTuple):
    """Dimensions of a tensor: where it has the sequence, where the heads; `None`: not at all."""

    sequence: int | None = None
    heads: int | None = None


def _place(layout):
    return Place(*(layout.index(letter) if letter in layout else None for letter in "SH"))


class Spec:
    """How one function is split over ranks.

    Args:
        names (`str`): a regular expression of the names it goes by.
        arguments (`str`): its leading parameters in order, behind `*` those that are given by name, each with the layout of
            its first dimensions: S sequence, H heads or channels. One without is no tensor, or one that is refused.
            Tensors with fewer heads than `heads_of` has share them (GQA, Mamba 2's groups).
        output (`str`): the layout of the first tensor it returns.
        heads_of (`str`): the argument whose heads are counted.
        kind (`str`): "heads"; "halo": positions before the shard are all it needs; "decline": it returns `None`, as kernels that
            are not installed do.
    """

    def __init__(self, names, arguments, output="BSH", heads_of="", kind="heads"):
        self.names, self.output, self.heads_of, self.kind = names, _place(output), heads_of, kind
        self.order, self.places, self._aliases = [], {}, {}
        leading, _, named = arguments.partition(" * ")
        for word in [*leading.split(), *named.split()]:
            known, _, layout = word.partition(":")
            name = known.split("|")[0]
            self._aliases.update(dict.fromkeys(known.split("|"), name))
            if layout:
                self.places[name] = _place(layout)
            if len(self.order) < len(leading.split()):
                self.order.append(name)

    def parameter(self, name):
        """The name by which `places` knows a parameter, or the name itself."""
        return self._aliases.get(name, name)

    def takes(self, parameters):
        """Whether a function with these parameters is meant; `()`: a wrapper that hides them."""
        required = self.order[: {"heads": 4, "halo": 2, "decline": 1}[self.kind]]
        return not parameters or [self.parameter(name) for name in parameters][: len(required)] == required


_GATES = " * A_log:H dt_bias:H g_gamma:H"

SPECS = (
    Spec(r"causal_conv1d_fn", "hidden_states|x:BHS weight:H bias:H * seq_idx:BS", "BHS", kind="halo"),
    Spec(
        r"(torch_)?(chunk|(fused_)?recurrent)_(gated_)?delta_rule|(chunk|(fused_)?recurrent)_(kda|kimi_delta_attention)",
        "query|q:BSH key|k:BSH value|v:BSH g:BSH beta:BSH" + _GATES,
        heads_of="value",
    ),
    Spec(
        r"(chunk|fused_recurrent)_(simple_gla|gla|retention|linear_attn)",
        "query|q:BSH key|k:BSH value|v:BSH g|gk:BSH" + _GATES,
        heads_of="value",
    ),
    Spec(
        r"mamba_selective_scan|selective_scan_fn",
        "hidden_states|u:BHS dt|delta:BHS A:H B:BNS C:BNS D:H z:BHS delta_bias:H delta_softplus",
        "BHS",
        heads_of="hidden_states",
    ),
    Spec(
        r"mamba2_chunk_scan|mamba_chunk_scan_combined",
        "hidden_states|x:BSH dt:BSH A:H B:BSH C:BSH chunk_size D:H z:BSH dt_bias:H initial_states * seq_idx:BS",
        heads_of="hidden_states",
    ),
    Spec(
        r"lightning_attention|lightning_attn\w*",
        "query|q:BHS key|k:BHS value|v:BHS slope_rate|s|slopes:H",
        "BHS",
        heads_of="value",
    ),
    Spec(r"rwkv_linear_attention(_cpu)?", "time_decay:H time_first:H key:BSH value:BSH", heads_of="value"),
    Spec(r"(chunk|fused_recurrent)_rwkv6", "r|q:BSH k:BSH v:BSH w:BSH u:H", heads_of="v"),
    Spec(r"mlstm_backend", "query|q:BHS key|k:BHS value|v:BHS igate|i:BHS fgate|f:BHS", "BHS", heads_of="value"),
    # Everything in one kernel, projections included: what they do without it can be split.
    Spec(r"mamba2?_split_conv1d_scan_combined", "zxbcdt", kind="decline"),
    Spec(r"mamba_inner_fn", "xz", kind="decline"),
)


@functools.cache
def named(name) -> list:
    """The specs of functions with this name."""
    return [spec for spec in SPECS if re.fullmatch(spec.names, name)]


def spec_of(names, parameters):
    """The spec of a function known by one of `names` with these parameters, or `None`."""
    fitting = (spec for name in names for spec in named(name) if spec.takes(parameters))
    return next(fitting, None)
