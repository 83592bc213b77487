"""flash-attn 2.8's compiled part in plain torch: the four functions that its Python package calls in training.

    fwd, varlen_fwd   -> out, softmax_lse, P (not made), random state
    bwd, varlen_bwd   -> dq, dk, dv (written in place), softmax_d

1. What the kernels check (csrc/flash_attn/flash_api.cpp) is asserted here, and what they take at its word and would read
   wild memory by: boundaries that end with the row, none longer than `max_seqlen`, addresses of 16 bytes.
2. What they compute is computed here: softmax scale, softcap, causal masks and windows aligned to the bottom right, grouped
   heads, the logarithm of the sum that backward needs. A query without keys gives zero.
3. `exact(True)` lets float32 and float64 in, which no kernel takes: for comparing to the last bits.

Not covered, asserted absent: dropout, ALiBi, paged and padded keys, returned probabilities.
"""

import contextlib
import math

import torch

# Names of the functions that have been called, in order.
calls = []
_dtypes = {torch.float16, torch.bfloat16}
_state = {"exact": False}


@contextlib.contextmanager
def exact(on=True):
    """Inside, float32 and float64 are taken, too."""
    before, _state["exact"] = _state["exact"], on
    try:
        yield
    finally:
        _state["exact"] = before


def fwd(q, k, v, out, alibi_slopes, p_dropout, softmax_scale, causal, left, right, softcap, return_softmax, gen):
    calls.append("fwd")
    assert out is None and alibi_slopes is None and p_dropout == 0 and not return_softmax and gen is None
    _check_inputs(q, k, v, dims=4)
    assert len(q) == len(k) == len(v) and k.shape == v.shape and q.shape[-1] == k.shape[-1]
    parts = [_forward(*one, softmax_scale, causal, left, right, softcap) for one in zip(q, k, v)]
    out, lse = (torch.stack(part) for part in zip(*parts))
    return out.to(q.dtype), lse, q.new_empty(0), _random_state(q)


def varlen_fwd(
    q, k, v, out, cu_q, cu_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_q, max_k, p_dropout, softmax_scale,
    zero_tensors, causal, left, right, softcap, return_softmax, gen,
):  # fmt: skip
    calls.append("varlen_fwd")
    assert (out, seqused_k, leftpad_k, block_table, alibi_slopes, gen) == (None,) * 6
    assert p_dropout == 0 and not return_softmax and not zero_tensors
    _check_inputs(q, k, v, dims=3)
    out, lse = torch.zeros_like(q, memory_format=torch.contiguous_format), _lse(q)
    for of_q, of_k in _documents(q, k, cu_q, cu_k, max_q, max_k):
        part, lse[:, of_q] = _forward(q[of_q], k[of_k], v[of_k], softmax_scale, causal, left, right, softcap)
        out[of_q] = part.to(q.dtype)
    return out, lse, q.new_empty(0), _random_state(q)


def bwd(
    dout, q, k, v, out, lse, dq, dk, dv, alibi_slopes, p_dropout, softmax_scale, causal, left, right, softcap,
    deterministic, gen, rng_state,
):  # fmt: skip
    calls.append("bwd")
    assert alibi_slopes is None and p_dropout == 0 and gen is None and rng_state is not None
    _check_inputs(q, k, v, dims=4)
    _check_gradients(dout, q, k, v, out, lse, dq, dk, dv)
    assert lse.shape == (len(q), q.shape[2], q.shape[1])
    for i in range(len(q)):
        grads = _backward(dout[i], q[i], k[i], v[i], out[i], lse[i], softmax_scale, causal, left, right, softcap)
        for whole, part in zip((dq, dk, dv), grads):
            whole[i] = part.to(q.dtype)
    return dq, dk, dv, torch.empty_like(lse)


def varlen_bwd(
    dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, alibi_slopes, max_q, max_k, p_dropout, softmax_scale, zero_tensors,
    causal, left, right, softcap, deterministic, gen, rng_state,
):  # fmt: skip
    calls.append("varlen_bwd")
    assert alibi_slopes is None and p_dropout == 0 and gen is None and rng_state is not None and not zero_tensors
    _check_inputs(q, k, v, dims=3)
    _check_gradients(dout, q, k, v, out, lse, dq, dk, dv)
    assert lse.shape == (q.shape[1], q.shape[0])
    for of_q, of_k in _documents(q, k, cu_q, cu_k, max_q, max_k):
        few = (dout[of_q], q[of_q], k[of_k], v[of_k], out[of_q], lse[:, of_q])
        grads = _backward(*few, softmax_scale, causal, left, right, softcap)
        dq[of_q], dk[of_k], dv[of_k] = (part.to(q.dtype) for part in grads)
    return dq, dk, dv, torch.empty_like(lse)


# -- what the kernels check ----------------------------------------------------------------------------------------------


def _check_inputs(q, k, v, dims):
    allowed = _dtypes | ({torch.float32, torch.float64} if _state["exact"] else set())
    assert q.dtype == k.dtype == v.dtype and q.dtype in allowed, f"FlashAttention only supports fp16 and bf16: {q.dtype}"
    assert q.device == k.device == v.device
    for tensor in (q, k, v):
        assert tensor.dim() == dims and tensor.numel() > 0
        _check_layout(tensor)
    heads, kv_heads, size = q.shape[-2], k.shape[-2], q.shape[-1]
    assert size == k.shape[-1] == v.shape[-1] and k.shape == v.shape, "one head size for query, key and value"
    assert size % 8 == 0 and size <= 256, f"head size {size}: a multiple of 8, at most 256"
    assert heads % kv_heads == 0, f"{heads} query heads are no multiple of {kv_heads} key/value heads"


def _check_layout(tensor):
    assert tensor.stride(-1) == 1, "the last dimension must be contiguous"
    # Kernels load 16 bytes at a time: 8 elements of half precision.
    strides = [stride for stride, size in zip(tensor.stride()[:-1], tensor.shape) if size > 1]
    assert tensor.storage_offset() % 8 == 0 and all(stride % 8 == 0 for stride in strides), "misaligned address"


def _check_gradients(dout, q, k, v, out, lse, dq, dk, dv):
    assert dout.dtype == out.dtype == dq.dtype == dk.dtype == dv.dtype == q.dtype and lse.dtype == _wide(q)
    assert dout.shape == out.shape == q.shape == dq.shape and k.shape == dk.shape and v.shape == dv.shape
    for tensor in (dout, out, dq, dk, dv):
        _check_layout(tensor)


def _documents(q, k, cu_q, cu_k, max_q, max_k):
    for cu, tensor, longest in ((cu_q, q, max_q), (cu_k, k, max_k)):
        assert cu.dtype == torch.int32 and cu.is_contiguous() and cu.dim() == 1 and cu.device == q.device
        assert type(longest) is int and longest > 0
        # The kernels do not look, and compute nothing, or somebody else's, beyond.
        assert cu[0] == 0 and cu[-1] == len(tensor), f"boundaries of {cu.tolist()} for {len(tensor)} tokens"
        assert 0 <= cu.diff().min() and cu.diff().max() <= longest, f"max_seqlen={longest} for {cu.diff().tolist()}"
    assert cu_q.shape == cu_k.shape
    for (q0, q1), (k0, k1) in zip(zip(cu_q.tolist(), cu_q[1:].tolist()), zip(cu_k.tolist(), cu_k[1:].tolist())):
        if q1 > q0:
            yield slice(q0, q1), slice(k0, k1)


# -- what they compute, of one document: `[tokens, heads, size]` ---------------------------------------------------------


def _wide(q):
    return torch.promote_types(q.dtype, torch.float32)


def _lse(q_SHD):
    return torch.full((q_SHD.shape[1], q_SHD.shape[0]), math.inf, dtype=_wide(q_SHD), device=q_SHD.device)


def _random_state(q):
    return torch.zeros(2, dtype=torch.int64, device=q.device)


def _scores(q_SHD, k_SGD, scale, causal, left, right, softcap):
    """Scores `[H, Sq, Sk]`, what softcap did to their gradient, and the keys as every query head sees them."""
    wide = _wide(q_SHD)
    key_HSD = k_SGD.to(wide).transpose(0, 1).repeat_interleave(q_SHD.shape[1] // k_SGD.shape[1], dim=0)
    scores = q_SHD.to(wide).transpose(0, 1) @ key_HSD.transpose(1, 2) * scale
    slope = None
    if softcap > 0:
        slope = 1 - torch.tanh(scores / softcap).square()
        scores = torch.tanh(scores / softcap) * softcap
    # Aligned to the bottom right.
    behind = torch.arange(len(q_SHD))[:, None] + len(k_SGD) - len(q_SHD) - torch.arange(len(k_SGD))
    right = 0 if causal else right
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if left >= 0:
        hidden |= behind > left
    if right >= 0:
        hidden |= behind < -right
    return scores.masked_fill(hidden.to(scores.device), -math.inf), slope, key_HSD


def _forward(q_SHD, k_SGD, v_SGD, scale, causal, left, right, softcap):
    scores, _, _ = _scores(q_SHD, k_SGD, scale, causal, left, right, softcap)
    value_HSD = v_SGD.to(scores.dtype).transpose(0, 1).repeat_interleave(q_SHD.shape[1] // v_SGD.shape[1], dim=0)
    lse = scores.logsumexp(dim=-1)
    lse = lse.where(lse > -math.inf, math.inf)
    return ((scores - lse[..., None]).exp() @ value_HSD).transpose(0, 1).to(q_SHD.dtype), lse


def _backward(dout_SHD, q_SHD, k_SGD, v_SGD, out_SHD, lse_HS, scale, causal, left, right, softcap):
    scores, slope, key_HSD = _scores(q_SHD, k_SGD, scale, causal, left, right, softcap)
    dout_HSD, out_HSD = (tensor.to(scores.dtype).transpose(0, 1) for tensor in (dout_SHD, out_SHD))
    groups = q_SHD.shape[1] // k_SGD.shape[1]
    value_HSD = v_SGD.to(scores.dtype).transpose(0, 1).repeat_interleave(groups, dim=0)
    weights = (scores - lse_HS[..., None]).exp()
    # The softmax's gradient needs the sum of dout * out, row by row.
    dscores = weights * (dout_HSD @ value_HSD.transpose(1, 2) - (dout_HSD * out_HSD).sum(dim=-1, keepdim=True)) * scale
    dscores = dscores if slope is None else dscores * slope
    dq = dscores @ key_HSD
    dk, dv = dscores.transpose(1, 2) @ q_SHD.to(scores.dtype).transpose(0, 1), weights.transpose(1, 2) @ dout_HSD
    dk, dv = (grad.unflatten(0, (-1, groups)).sum(dim=1) for grad in (dk, dv))
    return [grad.transpose(0, 1) for grad in (dq, dk, dv)]
