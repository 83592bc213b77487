"""Private names of upstream that the package uses: every one is listed here, with a check that says when it moves."""

import ast
import collections
import copyreg
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from transformers import LlamaForCausalLM, Trainer

import hf_ulysses

from ..models import checkpoint, config_of


def llama():
    return LlamaForCausalLM(config_of("llama"))


def checkpointed_layer():
    model = llama()
    checkpoint(model)
    return model.model.layers[0]


def parameters(function):
    return list(inspect.signature(function).parameters)


# name: whether it still is what the package takes it for. A name that moves is looked for in the release that moved it;
# one that the package no longer uses leaves the list.
NAMES = {
    # torch
    "_modules": lambda: "layers" in llama().model._modules,
    "_buffers": lambda: "inv_freq" in llama().model.rotary_emb._buffers,
    "_orig_mod": lambda: "_orig_mod" in dict(torch.compile(torch.nn.Linear(2, 2)).named_children()),
    "_pytree": lambda: torch.utils._pytree.tree_map_only(int, str, [(1, 2.0)]) == [("1", 2.0)],
    "_cdata": lambda: (t := torch.ones(2)).untyped_storage()._cdata == t[1:].untyped_storage()._cdata,
    # transformers
    "_attn_implementation": lambda: llama().config._attn_implementation == "sdpa",
    "_gradient_checkpointing_func": lambda: callable(vars(checkpointed_layer())["_gradient_checkpointing_func"]),
    "_get_num_items_in_batch": lambda: parameters(Trainer._get_num_items_in_batch) == ["self", "batch_samples", "device"],
    "_get_train_sampler": lambda: callable(vars(Trainer)["_get_train_sampler"]),
    "_load_rng_state": lambda: parameters(Trainer._load_rng_state) == ["self", "checkpoint"],
    # Since transformers 5.2; the package does without it before.
    "_track_num_input_tokens": lambda: parameters(getattr(Trainer, "_track_num_input_tokens", _track)) == ["self", "inputs"],
    # accelerate
    "_shared_state": lambda: isinstance(AcceleratorState._shared_state, dict),
    "_validate_accelerator": lambda: parameters(ParallelismConfig._validate_accelerator) == ["self", "accelerator"],
    # deepspeed: `deepspeed.utils.groups:_get_sequence_parallel_` + group, rank, world_size
    "_get_sequence_parallel_": lambda: all(callable(getattr(groups(), "_get_sequence_parallel_" + of)) for of in GETTERS),
    # trl, of the planner: which its torch path calls on CPUs
    "_forward_tile": lambda: callable(trl_kernels()._forward_tile),
    "_backward_tile": lambda: callable(trl_kernels()._backward_tile),
    # trl: the trainers that generate
    "_calculate_rewards": lambda: all(callable(vars(trainer)["_calculate_rewards"]) for trainer in generating()),
    "_generate": lambda: all(parameters(trainer._generate) == ["self", "prompts"] for trainer in generating()),
    "_calculate_rewards_from_functions": lambda: callable(vars(online_dpo())["_calculate_rewards_from_functions"]),
    "_generate_single_turn": lambda: all(callable(vars(trainer)["_generate_single_turn"]) for trainer in generating()),
    # Python
    "_fields": lambda: collections.namedtuple("Pair", "a b")._fields == ("a", "b"),
    "_reconstructor": lambda: callable(copyreg._reconstructor),
}
GETTERS = ("group", "rank", "world_size")


def generating():
    trl = pytest.importorskip("trl")
    return trl.GRPOTrainer, trl.RLOOTrainer


def online_dpo():
    if importlib.util.find_spec("trl.experimental.online_dpo") is None:
        pytest.skip("of another version")
    from trl.experimental.online_dpo import OnlineDPOTrainer

    return OnlineDPOTrainer


def _track(self, inputs):
    pass


def trl_kernels():
    return pytest.importorskip("trl.kernels.chunked_logprob")


def groups():
    return pytest.importorskip("deepspeed").utils.groups


PACKAGE = Path(hf_ulysses.__file__).parent
SOURCES = [file.read_text() for file in sorted(PACKAGE.rglob("*.py"))]


def used_and_defined(source):
    """Private names that `source` reads from objects or writes in strings, and those that it defines itself.

    Not seen: a name that the package gives to something of its own, too (`object._name = `), unless `super()` is asked.
    """
    used, defined, inherited = set(), set(), set()
    tree = ast.parse(source)
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for item in node.body:
                if isinstance(item, (ast.FunctionDef, ast.ClassDef)):
                    defined.add(item.name)
                targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
                defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.Attribute):
            if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
                defined.add(node.attr)
            elif isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
                inherited.add(node.attr)
            else:
                used.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            used.add(re.split("[.:]", node.value)[-1])
        elif isinstance(node, ast.keyword):
            defined.add(node.arg or "")
        elif isinstance(node, ast.ImportFrom):
            (defined if node.level else used).update(alias.name for alias in node.names)
    private = lambda names: {name for name in names if re.fullmatch(r"_[a-z]\w*", name)}
    return private(used), private(defined), private(inherited)


def names_of_upstream(sources):
    used, defined, inherited = (set().union(*sets) for sets in zip(*map(used_and_defined, sources)))
    return used - defined | inherited


@pytest.mark.versions
@pytest.mark.parametrize("name", NAMES)
def test_the_name_is_where_it_was(name):
    assert NAMES[name](), f"{name} has moved: look for it in the release notes, and in hf_ulysses/ for what relies on it"


def test_every_private_name_of_upstream_is_listed():
    unlisted = names_of_upstream(SOURCES) - set(NAMES)
    assert not unlisted, f"{unlisted}: use a public name, or add a check to NAMES"


def test_what_is_no_longer_used_leaves_the_list():
    unused = {name for name in NAMES if not any(re.search(rf"\b{name}", source) for source in SOURCES)}
    assert not unused, f"{unused}: remove from NAMES"


def test_this_check_sees_names():
    sources = [
        "class A:\n  _b = 1\n  def _c(self): return self._d + super()._c()",
        "from torch import _e\nfrom .a import _f\nx = getattr(y, '_g')\nPatch('a.b:C._h')\nx._i = y._i\n'_j in a sentence'",
    ]
    assert names_of_upstream(sources) == {"_c", "_d", "_e", "_g", "_h"}
