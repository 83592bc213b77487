"""Kernels of linear attention that cannot run here: their real signatures, against what is declared of them (mixing/specs.py).

Triton's interpreter cannot run those of flash-linear-attention, whose tuning asks for a device, nor those of mamba_ssm and
causal_conv1d, which need their compiled part. The signatures are those of flash-linear-attention 0.6.0, mamba_ssm 2.3.2 and
causal_conv1d 1.7.0.
"""

import pytest

from hf_ulysses.mixing.specs import SPECS, spec_of

# Function -> its parameters that are tensors with the row's sequence or heads in them, then the others.
DECLARED = {
    "causal_conv1d_fn": ("x weight bias seq_idx", "initial_states return_final_states final_states_out activation"),
    "chunk_gated_delta_rule": (
        "q k v g beta",
        "scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first "
        "cu_seqlens cu_seqlens_cpu chunk_indices cp_context",
    ),
    "chunk_kda": (
        "q k v g beta",
        "scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel use_beta_sigmoid_in_kernel "
        "allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states state_v_first cu_seqlens "
        "cu_seqlens_cpu cp_context use_graph max_num_seqs",
    ),
    "fused_recurrent_kda": (
        "q k v g beta A_log dt_bias",
        "scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel use_beta_sigmoid_in_kernel "
        "allow_neg_eigval lower_bound state_v_first cu_seqlens",
    ),
    "chunk_gla": ("q k v g", "scale initial_state output_final_state state_v_first cu_seqlens cu_seqlens_cpu"),
    "chunk_simple_gla": ("q k v g g_gamma", "scale initial_state output_final_state state_v_first cu_seqlens cu_seqlens_cpu"),
    "fused_recurrent_simple_gla": ("q k v g g_gamma", "scale initial_state output_final_state reverse state_v_first cu_seqlens"),
    "chunk_rwkv6": ("r k v w u", "scale initial_state output_final_state cu_seqlens cu_seqlens_cpu"),
    "fused_recurrent_rwkv6": ("r k v w u", "scale initial_state output_final_state reverse cu_seqlens"),
    "selective_scan_fn": ("u delta A B C D z delta_bias", "delta_softplus return_last_state"),
    "mamba_chunk_scan_combined": (
        "x dt A B C D z dt_bias seq_idx",
        "chunk_size initial_states cu_seqlens dt_softplus dt_limit return_final_states return_varlen_states",
    ),
}
# What of a row a signature lets in and no spec knows: a call that gives it is refused, by `scans._places`.
UNKNOWN = {"fused_recurrent_gated_delta_rule": ("q k v g", {"gk", "gv"}), "fused_recurrent_gla": ("q k v gk", {"gv"})}
# Not declared, for lack of a gate: the module around them runs on the whole row.
WHOLE = {
    "chunk_delta_rule": "q k v beta",
    "chunk_retention": "q k v scale",
    "chunk_linear_attn": "q k v scale",
}
DECLINED = {"mamba_split_conv1d_scan_combined": "zxbcdt conv1d_weight", "mamba_inner_fn": "xz conv1d_weight"}


@pytest.mark.parametrize("name", DECLARED)
def test_what_is_declared_is_what_kernels_take(name):
    tensors, others = (part.split() for part in DECLARED[name])
    spec = spec_of({name}, tuple(tensors + others))
    assert spec is not None and spec.kind in ("heads", "halo")
    places = {spec.parameter(parameter) for parameter in tensors}
    assert places <= set(spec.places), places - set(spec.places)
    assert not {spec.parameter(parameter) for parameter in others} & set(spec.places)
    # Given by place, behind a wrapper that hides the names, the first ones are the same.
    given = [spec.parameter(parameter) for parameter in tensors]
    assert spec.takes(tuple(given)) and spec.order[:2] == given[:2]
    assert spec_of({name}, ()) is spec


@pytest.mark.parametrize("name", UNKNOWN)
def test_arguments_that_no_spec_knows(name):
    first, unknown = UNKNOWN[name]
    spec = spec_of({name}, (*first.split(), *unknown))
    assert spec is not None and not unknown & set(spec.places)


@pytest.mark.parametrize("name", WHOLE)
def test_kernels_without_a_gate_are_nobodys_spec(name):
    assert spec_of({name}, tuple(WHOLE[name].split())) is None


@pytest.mark.parametrize("name", DECLINED)
def test_kernels_that_hold_everything_are_declined(name):
    assert spec_of({name}, tuple(DECLINED[name].split())).kind == "decline"


def test_every_kernel_spec_is_here():
    """Transformers' own fallbacks are run in tests/distributed/test_scans.py."""
    named = [spec_of({name}, ()) for name in (*DECLARED, *DECLINED)]
    only_fallbacks = {"lightning", "rwkv_linear", "mlstm"}
    for spec in SPECS:
        assert spec in named or any(word in spec.names for word in only_fallbacks), spec.names
