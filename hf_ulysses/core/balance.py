"""The load-balancing loss of mixtures of experts, from the whole row's statistics.

It is a product of two means over tokens, so means over shards do not add up to it. Modelling files have their own copy of
`load_balancing_loss_func(gate_logits, num_experts, top_k, attention_mask)`; the wrapper gathers the router logits, which
are small, and gives the function the whole row. Every rank then has the row's auxiliary loss, and adds its share of it to
its loss (attachment.py, `share_of_auxiliary`).
"""

import functools
import importlib
import importlib.util
import inspect
import sys

import torch

from .gather import gather_sequence
from .sequence import current_row

NAME = "load_balancing_loss_func"
_TRLS = "transformers.models.mixtral.modeling_mixtral"


@functools.lru_cache(maxsize=64)
def for_full_row(balance):
    """Wrap a load-balancing loss so that it sees the full row while a sharded forward runs."""
    signature = inspect.signature(balance)
    if not {"gate_logits", "attention_mask"} <= set(signature.parameters):
        return balance

    @functools.wraps(balance)
    def balance_row(*args, **kwargs):
        row = current_row()
        bound = signature.bind(*args, **kwargs)
        gates = bound.arguments["gate_logits"]
        if row is None or not isinstance(gates, tuple):
            return balance(*args, **kwargs)
        bound.arguments["gate_logits"] = _gather(gates, row)
        bound.arguments["attention_mask"] = None if row.attention_mask is None else row.attention_mask[:, : row.length]
        loss = balance(*bound.args, **bound.kwargs)
        return loss * row.share

    return balance_row


def sources_of_others() -> list:
    """Modelling files whose function is called for other models, too: TRL's fused head takes it from one for all."""
    if "trl" not in sys.modules or importlib.util.find_spec(_TRLS) is None:
        return []
    source = importlib.import_module(_TRLS)
    return [source] if callable(vars(source).get(NAME)) else []


def _gather(gates, row):
    """`(B * s, experts)` per layer -> `(B * S, experts)`, in one collective."""
    batch_size = row.position_ids.shape[-2]
    shards = torch.stack([gate.to(gates[0].device).reshape(batch_size, -1, gate.shape[-1]) for gate in gates])
    return gather_sequence(shards, row.attachment.group, dim=2, length=row.length).flatten(1, 2).unbind()
