"""What a function's output depends on, for functions of which that is known."""

import pytest
import torch

from hf_ulysses.mixing.dependence import ALONE, ByHeads, Halo, Place, split_of

S, HEADS, KEYS, SIZE = 23, 4, 2, 8


def conv(x_BCS, weight, bias=None):
    K = weight.shape[-1]
    return torch.nn.functional.conv1d(x_BCS, weight[:, None], bias, padding=K - 1, groups=len(weight))[..., : x_BCS.shape[-1]]


def scan(key, value, gate, decay=None):
    """A running sum over positions, of values gated by keys that several heads share."""
    key = key.repeat_interleave(value.shape[2] // key.shape[2], dim=2)
    gated = value * gate[..., None] * key.sum(-1, keepdim=True)
    return (gated if decay is None else gated * decay[:, None]).cumsum(1)


def arguments(heads=HEADS, keys=KEYS, batch=2):
    torch.manual_seed(0)
    return torch.randn(batch, S, keys, 5), torch.randn(batch, S, heads, SIZE), torch.randn(batch, S, heads)


def found(function, *args, size=2, **kwargs):
    return split_of(function, args, kwargs, S, size)


@pytest.mark.parametrize("bias", [None, torch.ones(6)], ids=["", "bias"])
@pytest.mark.parametrize("weight", [torch.ones(6, 4), torch.zeros(6, 4)], ids=["ones", "zeros"])
def test_a_causal_convolution_reaches_back_whatever_its_weights(weight, bias):
    split = found(conv, torch.randn(2, 6, S), weight, bias=bias)
    assert isinstance(split, Halo) and split.width == 3
    assert split.output == Place(2) and dict(split.places)["[0][0]"] == Place(2)
    assert dict(split.places)["[0][1]"] == Place(None)


def test_a_convolution_that_looks_ahead_is_split_by_channels():
    def ahead(x_BCS, weight):
        return conv(x_BCS.flip(-1), weight).flip(-1)

    split = found(ahead, torch.randn(2, 6, S), torch.ones(6, 4))
    assert isinstance(split, ByHeads) and split.output == Place(2, 1)
    assert dict(split.places) == {"[0][0]": Place(2, 1), "[0][1]": Place(None, 0)}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("keys", [1, 2, 4])
def test_a_scan_over_heads(keys, size):
    split = found(scan, *arguments(keys=keys), decay=torch.rand(2, HEADS, 1), size=size)
    assert split.output == Place(1, 2) and split.num_heads == HEADS and split.num_kv == (keys if keys > 1 else HEADS)
    key, value, gate, decay = dict(split.places).values()
    assert key == {1: Place(1), 2: Place(1, 2, True), 4: Place(1, 2)}[keys]
    assert (value, gate, decay) == (Place(1, 2), Place(1, 2), Place(None, 1))


def interleaved(key, value, gate):
    """Head `h` goes with key `h % keys`, not with key `h // groups`."""
    return scan(key.repeat(1, 1, value.shape[2] // key.shape[2], 1), value, gate)


def pairs_mix(key, value, gate):
    out = scan(key, value, gate)
    return out + 1e-9 * out.unflatten(2, (-1, 2)).flip(3).flatten(2, 3)


def all_mix(key, value, gate):
    return scan(key, value, gate) + 1e-9 * value.mean((2, 3), keepdim=True)


def for_four_heads(key, value, gate):
    assert value.shape[2:] == (4, SIZE)
    return scan(key, value, gate)


def with_state(key, value, gate):
    out = scan(key, value, gate)
    return out, out[:, -1]


def without_batch(key, value, gate):
    return scan(key[None], value[None], gate[None])[0]


def test_what_cannot_be_split():
    assert found(all_mix, *arguments()) is None
    assert found(for_four_heads, *arguments()) is None
    assert found(with_state, *arguments()) is None
    assert found(without_batch, *(tensor[0] for tensor in arguments())) is None
    assert found(scan, *arguments(), size=9) is None, "more ranks than heads"


@pytest.mark.parametrize("function", [pairs_mix, interleaved])
def test_what_holds_for_two_ranks_need_not_hold_for_four(function):
    """Then the values' columns are split, which know nothing of each other either, and every rank has all the keys."""
    two, four = (found(function, *arguments(), size=size) for size in (2, 4))
    assert two.output == Place(1, 2) and four.output == Place(1, 3)
    assert dict(four.places) == {"[0][0]": Place(1), "[0][1]": Place(1, 3), "[0][2]": Place(1)}


def first_position(x):
    return x + 0 * x[:, :1]


def masked(x, mask):
    return x * mask[:, 0, :, :1]


def test_what_knows_one_position_only():
    x, mask = torch.randn(2, S, 6), torch.ones(2, 1, S, S)
    assert found(torch.nn.functional.silu, x) == ALONE
    assert found(lambda x, mask: x * mask[..., None], x, torch.ones(2, S)) == ALONE
    assert found(lambda length: None, S) == ALONE
    assert found(first_position, x) != ALONE
    assert found(masked, x, mask) is None, "two dimensions as long as the row cannot be told apart"
