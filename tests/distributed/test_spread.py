"""Operations on a tensor that is held in part (hf_ulysses/spread/) against the same operations on the whole one."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hf_ulysses.mixing.spread import Ranks, Spread
from hf_ulysses.mixing.trial import trial

B, S, H, D = 2, 10, 6, 4


def heads(x):
    return x.view(x.shape[0], x.shape[1], -1, D).transpose(1, 2)


def attention(x, w):
    query, key, value = (heads(F.linear(x, w[i])) for i in ("q", "k", "v"))
    scores = query @ key.transpose(-1, -2) / math.sqrt(D) + w["mask"]
    return (scores.softmax(-1) @ value).transpose(1, 2).reshape(x.shape[0], x.shape[1], -1) @ w["o"]


def merged_into_the_batch(x, w):
    size = (x.shape[0] * H, -1, D)
    query, key, value = (heads(F.linear(x, w[i])).reshape(*size) for i in ("q", "k", "v"))
    scores = torch.baddbmm(w["alibi"], query, key.transpose(1, 2), beta=0.5, alpha=0.3)
    scores = scores.view(x.shape[0], H, S, -1) + w["mask"]
    weights = F.softmax(scores, dim=-1, dtype=torch.float64).to(x.dtype).view(x.shape[0] * H, S, -1)
    return torch.bmm(weights, value).view(x.shape[0], H, S, D).permute(0, 2, 1, 3).reshape(x.shape[0], S, H * D)


def one_key_head(x, w):
    query = heads(F.linear(x, w["q"]))
    key, value = (heads(F.linear(x, w[i][:D])) for i in ("k", "v"))
    return ((query @ key.transpose(-1, -2) + w["mask"]).softmax(-1) @ value).transpose(1, 2).flatten(2)


def repeated_heads(x, w):
    query = heads(F.linear(x, w["q"]))
    key, value = (heads(F.linear(x, w[i][: 3 * D])) for i in ("k", "v"))
    key, value = (t[:, :, None].expand(B, 3, 2, S, D).reshape(B, H, S, D) for t in (key, value))
    return ((query @ key.transpose(2, 3)).softmax(-1) @ value).transpose(1, 2).flatten(2)


def sdpa(x, w):
    query = heads(F.linear(x, w["q"]))
    key, value = (heads(F.linear(x, w[i][: 3 * D])) for i in ("k", "v"))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=w["mask"] + w["bias"], enable_gqa=True)
    return out.transpose(1, 2).reshape(B, S, H * D)


def rotary(x, w):
    query, cos, sin = heads(x), w["cos"][:, None], w["cos"][:, None].square()
    half = torch.cat((-query[..., D // 2 :], query[..., : D // 2]), dim=-1)
    return (query * cos + half * sin).transpose(1, 2).flatten(2)


def sinks(x, w):
    query = heads(x)
    scores = torch.cat([query @ query.mT, w["sink"].reshape(1, -1, 1, 1).expand(B, -1, S, -1)], dim=-1)
    return (scores.softmax(-1)[..., :-1] @ query).transpose(1, 2).flatten(2)


def blocks(x, w):
    query, out, state = heads(x), [], torch.zeros(B, H, D, D, dtype=x.dtype)
    for start in range(0, S, 4):
        q = query[:, :, start : start + 4]
        out.append(torch.matmul(q, state) + (q @ q.transpose(-1, -2) * w["bias"][:, :, :1, :1]) @ q)
        state = state * w["sink"][:, None, None] + q.transpose(-1, -2) @ q
    return torch.cat(out, dim=-2).transpose(1, 2).reshape(B, S, -1)


def scan(x, w):
    out, state = torch.zeros_like(x), 0
    for t in range(S):
        state = state * 0.5 + x[:, t] * w["gain"]
        out[:, t] = state
    return out


def indexer(x, w):
    q, k = x.view(B, S, H, D), F.linear(x, w["q"][:D])
    scores = torch.relu(q @ k.transpose(-1, -2).unsqueeze(1))
    scores = torch.matmul(x[..., None, :H], scores).squeeze(-2) + w["mask"][0]
    return scores, scores.topk(3, dim=-1).indices


def sparse(x, w):
    scores, chosen = indexer(x, w)
    hidden = chosen.new_ones((B, S, S), dtype=torch.bool).scatter(-1, chosen, False).unsqueeze(1)
    query = heads(x)
    scores = (query @ query.mT).masked_fill(hidden, -1e9)
    return (scores.softmax(-1) @ query).transpose(1, 2).flatten(2) + scores.gather(-1, chosen[:, None].expand(-1, H, -1, -1)).sum((1, 3))[..., None]


def in_place(x, w):
    scores = heads(x) @ heads(x).mT
    scores /= 2
    scores += w["mask"]
    probabilities = torch.nn.functional.dropout(scores.softmax(-1), 0.0)
    return (probabilities @ heads(x)).transpose(1, 2).contiguous().view(B, S, -1)


def pieces(x, w):
    first, second = (x * 2).chunk(2, dim=-1)
    third, fourth, fifth = torch.split(x.unflatten(-1, (H, D)), [2, 1, 3], dim=2)
    stacked = torch.stack([first, second], 2).flatten(2)
    return stacked + torch.cat([fifth, fourth, third], 2).flatten(2) + F.layer_norm(x, (H * D,), w["gain"])


def convolution(x, w):
    x = F.pad(x, (0, 0, 2, -2)) + x[:, :, list(range(H * D - 1, -1, -1))]
    out = F.conv1d(x.transpose(1, 2), w["q"][:, None, :3], w["gain"], padding=2, groups=H * D)[..., :S]
    return F.silu(out).transpose(1, 2).index_select(2, torch.arange(H * D))


def spelled_otherwise(x, w):
    query = torch.transpose(x.view(B, S, H, D), dim0=1, dim1=2)
    scores = torch.softmax(input=query @ query.mT, dim=-1).flip(dims=[2]).permute(dims=(1, 0, 2, 3)).permute(1, 0, 2, 3)
    scores = scores + w["bias"].expand_as(scores) - scores.sum(axis=-1, keepdims=True) * w["mask"][:1].expand(size=(B, 1, S, S)).clamp(-1)
    return (scores @ query).transpose(1, 2).reshape_as(x)


def contiguous_on_some_ranks(x, w):
    """Three heads: two are one more than a dimension of one."""
    scores = x.view(B, S, 3, -1).transpose(1, 2) @ x.view(B, S, 3, -1).transpose(1, 2).mT
    scores = scores.transpose(0, 1)
    first = scores.softmax(0)
    scores = scores if scores.is_contiguous() else scores.contiguous()
    return x + (first + scores.cumsum(0)).sum((0, 2))[..., None]


def rows_as_batch(x, w):
    flat = torch.addmm(w["gain"], x.view(-1, H * D), w["o"])
    return flat.view(B, S, -1).where(x > 0, 0.1)


def whole_at_last(x, w):
    return torch.fft.fft(x, dim=1).real + x.mean()


SPLIT = [attention, merged_into_the_batch, one_key_head, repeated_heads, sdpa, rotary, sinks, blocks, scan, sparse]
SPLIT += [in_place, pieces, convolution, spelled_otherwise, rows_as_batch]


# -- what is as long as the row, and other coincidences ---------------------------------------------------------------


def mixed_by_a_parameter(x, w):
    out = x * 1
    out += (w["positions"] @ heads(x)).transpose(1, 2).flatten(2) @ w["o"]
    return out


def sorted_by_position(x, w):
    out = x * 1
    out += x.gather(1, x.argsort(1)) @ w["o"]
    return out


def shifted_in(x, w):
    out = x * 1
    out += torch.cat([x[:, 1:], w["cos"].repeat(1, 1, H)[:, :1]], 1) @ w["o"]
    return out


def heads_against_rows(x, w):
    """Broadcast of one with the other where there are as many."""
    both = heads(x) @ x.view(B, S, H, D).mT.mean(1, keepdim=True)
    return x + both.sum((1, 3))[..., None] + x.flip(1, 2)


def as_many_heads_as_rows(x, w):
    return (heads(x) - x.view(B, S, H, D)).transpose(1, 2).flatten(2) + (heads(x).softmax(2) @ x.view(B, S, H, D).mT).sum((1, 3))[..., None]


def attention_of_as_many(x, w):
    query, key = x.view(B, S, H, D), heads(x)
    return F.scaled_dot_product_attention(query, key, key).transpose(1, 2).flatten(2)


COINCIDENCES = [mixed_by_a_parameter, sorted_by_position, shifted_in, heads_against_rows]
SHAPES = [(2, 5, 6, 5), (1, 24, 6, 4), (3, 6, 3, 2), (2, 7, 6, 4), (4, 8, 4, 2)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("function", COINCIDENCES, ids=lambda f: f.__name__)
def test_sizes_that_coincide(ranks, size, shape, function):
    for difference, _ in ranks(size).run(compared, function, shape):
        assert difference < 1e-11


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", [(2, 5, 5, 2), (2, 7, 7, 2)], ids=str)
@pytest.mark.parametrize("function", [as_many_heads_as_rows, attention_of_as_many], ids=lambda f: f.__name__)
def test_as_many_heads_as_rows(ranks, size, shape, function):
    for difference, _ in ranks(size).run(compared, function, shape):
        assert difference < 1e-11


# -- comparing --------------------------------------------------------------------------------------------------------


def weights():
    generator = torch.Generator().manual_seed(1)
    new = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator) * 0.5  # noqa: E731
    named = {name: new(H * D, H * D) for name in "qkvo"}
    named |= dict(alibi=new(B * H, 1, S), bias=new(1, H, S, S), cos=new(B, S, D), sink=new(H), gain=new(H * D))
    named |= dict(positions=new(H, S, S))
    named = {name: tensor.requires_grad_() for name, tensor in named.items()}
    causal = torch.full((S, S), -1e9, dtype=torch.float64).triu(1)
    return {**named, "mask": causal[None, None].expand(B, 1, S, S)}


def reference(function):
    x, w = torch.randn(B, S, H * D, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), weights()
    out = function(x.requires_grad_(), w)
    (out * direction()).sum().backward()
    return x, out, w


def direction():
    return torch.randn(B, S, H * D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def compared(function, shape=(2, 10, 6, 4)):
    """The largest difference of output, input gradient and parameter gradients; and what ran on the whole row."""
    globals().update(zip("BSHD", shape))
    size, rank = dist.get_world_size(), dist.get_rank()
    x, expected, expected_weights = reference(function)
    shard = -(-S // size)
    ranks = Ranks(dist.group.WORLD, rank, size, S, shard)
    rows = slice(min(rank * shard, S), min((rank + 1) * shard, S))
    real = rows.stop - rows.start

    def cut(tensor):
        return torch.cat([tensor[:, rows], torch.zeros(B, shard - real, *tensor.shape[2:], dtype=tensor.dtype)], 1)

    w, local = weights(), cut(x.detach()).requires_grad_()
    out = function(Spread.of_shard(local, 1, ranks), w)
    out = out.to_shard(1) if isinstance(out, Spread) else cut(out)
    (out[:, :real] * direction()[:, rows]).sum().backward()
    differences = [(out[:, :real] - expected[:, rows]).abs().max() if real else torch.zeros(())]
    differences.append((local.grad[:, :real] - x.grad[:, rows]).abs().max() if real else torch.zeros(()))
    for name, weight in w.items():
        if weight.requires_grad:
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(grad)
            other = expected_weights[name].grad
            differences.append((grad - (torch.zeros_like(grad) if other is None else other)).abs().max())
    return max(float(d.detach()) for d in differences), ranks.undone


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("function", SPLIT, ids=lambda f: f.__name__)
def test_operations_are_split(ranks, size, function):
    for difference, undone in ranks(size).run(compared, function):
        assert difference < 1e-11 and not undone, (difference, undone)


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_not_known_runs_on_the_whole_row(ranks, size):
    """Noted once it is more than came in."""
    for difference, undone in ranks(size).run(compared, whole_at_last):
        assert difference < 1e-11 and undone == ["mean: no dimension is named"]


def through_a_view(x, w):
    out = x * 2
    out[..., :3] += w["gain"][:3]
    out.view(B, S, H, D)[:, :, 1:2].mul_(3)
    return out


def by_position(x, w):
    out = x.clone()
    out[:, 2] = w["gain"]
    return out


def twice(x, w):
    """Filled, written to for some channels of all positions, then for some positions."""
    out = torch.zeros_like(x)
    out[..., :3] = x[..., :3]
    out[:, 2:4] = w["gain"]
    return out


def between_sums(x, w):
    """What was moved for the first sum is out of date for the second."""
    out = x.clone()
    out[..., :3] = w["gain"][:3]
    before = out.cumsum(1)
    out[:, 2] = w["gain"]
    return before + out.cumsum(1)


def written_as_held(x, w):
    """Written to by heads and by rows, in parts and after a scatter."""
    blocks = heads(x) @ heads(x).mT
    out = blocks.new_full((B, H, S, 2 * S), 2.0)
    out[..., S:] = blocks
    chosen = x[..., :3].new_zeros((B, S, H * D)).scatter_(-1, x[..., :2].topk(2, dim=-1).indices, 1.0)
    return x * chosen + out.sum((1, 3))[..., None]


def memory_of_its_own():
    spread = Spread.of_shard(torch.ones(B, S, H * D), 1, Ranks(dist.group.WORLD, dist.get_rank(), 2, 2 * S, S))
    for name in ("data_ptr", "numpy", "untyped_storage"):
        with pytest.raises(AttributeError, match=f"a Spread has no {name}"):
            getattr(spread, name)()


def test_kernels_do_not_get_at_its_memory(ranks):
    ranks(2).run(memory_of_its_own)


def test_ranks_with_one_head_and_with_two(ranks):
    for difference, _ in ranks(2).run(compared, contiguous_on_some_ranks):
        assert difference < 1e-11


def of_what_is_seen(x, w):
    """By position, with a view by channels."""
    out = x.clone()
    channels = out[..., :3]
    out[:, 2] = w["gain"]
    return out + channels.sum()


def through_a_position(x, w):
    out = x * 2
    position = out[:, 2]
    position += 1
    return out


def what_was_reshaped(x, w):
    query = heads(x * 2)
    merged = query.transpose(1, 2).reshape(B, S, H * D)
    query += 1
    return merged


def what_was_made_contiguous(x, w):
    out = x * 2
    same = out.contiguous()
    same += 1
    return out


def filled_and_added_to(x, w):
    out = torch.zeros_like(x)
    out += x
    out[:, 2] = 1
    mask = torch.ones_like(heads(x))
    mask.masked_fill_(heads(x) < 0, 0.0)
    mask[:, :, 0] = 1
    return out * mask.sum((1, 3))[..., None]


def with_every_operator(x, w):
    out, positive = x * 1, x > 0
    some, few = out[..., :3], positive[..., :4]
    few |= True
    few ^= few
    some **= 2
    some %= 3
    return out * positive + out


def scattered_by_name(x, w):
    index = x.topk(3, dim=-1).indices
    plain = w["o"][:S, :3][None].expand(B, S, 3)
    return torch.zeros_like(x).scatter_(-1, index, src=plain) + torch.zeros_like(x).scatter(-1, index, src=x.topk(3, -1)[0])


def of_a_diagonal(x, w):
    scores = heads(x) @ heads(x).mT
    scores.diagonal(dim1=-2, dim2=-1).mul_(0)
    return scores.sum((1, 3))[..., None] * x


def in_place_of_a_function(x, w):
    out = heads(x * 2)
    F.relu(out.flatten(2), inplace=True)
    return out.transpose(1, 2).flatten(2)


WRITTEN = [through_a_view, by_position, twice, between_sums, written_as_held, filled_and_added_to]
WRITTEN += [with_every_operator, scattered_by_name]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("function", WRITTEN, ids=lambda f: f.__name__)
def test_writing(ranks, size, function):
    for difference, undone in ranks(size).run(compared, function):
        assert difference < 1e-11 and not undone, (difference, undone)


def refused(function):
    with pytest.raises(TypeError, match="writes to a tensor|was written to"):
        compared(function)


UNKNOWN = [of_what_is_seen, through_a_position, what_was_reshaped, what_was_made_contiguous, in_place_of_a_function]
UNKNOWN += [of_a_diagonal]


@pytest.mark.parametrize("function", UNKNOWN, ids=lambda f: f.__name__)
def test_writing_where_a_part_does_not_show_who_sees_it(ranks, function):
    ranks(2).run(refused, function)


class Zeros(torch.autograd.Function):
    """Fills a tensor of its own, as kernels' wrappers do: nothing that it is given is a tensor to autograd."""

    @staticmethod
    def forward(ctx, x):
        out = torch.zeros(x.shape, dtype=x.dtype)
        out[:, 0] = x[:, 0]
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad


def given_to_an_autograd_function():
    local = torch.ones(B, S // 2, H * D)
    spread = Spread.of_shard(local, 1, Ranks(dist.group.WORLD, dist.get_rank(), 2, S, S // 2))
    with pytest.raises(TypeError, match="an autograd function"), trial(dist.group.WORLD, local.device):
        Zeros.apply(spread)


def test_autograd_functions_are_refused(ranks):
    ranks(2).run(given_to_an_autograd_function)
