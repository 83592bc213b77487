"""transformers' own flash attention dispatch on a CPU: `with flash(KEY, exact=...)`.

    flash_attention_2                   flash-attn's real Python package over our extension (flash_attn_2_cuda.py)
    flash_attention_3, _4               functions with the signatures of the sources that flash-attn 2.8 ships (hopper/, cute/),
                                        which hand on to the above what it knows and assert that the rest is not asked for
    kernels-community/flash-attn2       what the hub gives: a module with flash-attn's functions

Replaced besides: whether the packages are there, which transformers denies without a GPU.
"""

import ast
import contextlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

from . import flash_attn_2_cuda as extension

HUB = "kernels-community/flash-attn2"
KEYS = ("flash_attention_2", "flash_attention_3", "flash_attention_4", HUB)
_OPERATORS = ("_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_backward", "_flash_attn_varlen_backward")


def package():
    """flash-attn's Python package, its operators made to run on a CPU."""
    if "flash_attn" not in sys.modules:
        sys.modules["flash_attn_2_cuda"] = extension
        import flash_attn
        from flash_attn import flash_attn_interface

        for name in _OPERATORS:
            # They are declared for CUDA alone; the functions are the same.
            operator = getattr(flash_attn_interface, name)
            operator.register_kernel("cpu")(operator._init_fn)
    return sys.modules["flash_attn"]


@contextlib.contextmanager
def flash(key, exact=False):
    """Inside, models with `attn_implementation=key` run. Gives the list of functions of the extension that are called."""
    from transformers import modeling_flash_attention_utils as dispatch
    from transformers.integrations import hub_kernels
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    real = package()
    modules = {
        "flash_attn_interface": _newer("flash_attn_interface", _source("hopper", "flash_attn_interface.py")),
        "flash_attn.cute": _newer("flash_attn.cute", _source("flash_attn", "cute/interface.py")),
    }
    with contextlib.ExitStack() as stack:
        for version in (2, 3, 4):
            there = key == f"flash_attention_{version}"
            stack.enter_context(mock.patch.object(dispatch, f"is_flash_attn_{version}_available", lambda there=there: there))
        # Not `patch.dict`, which forgets everything else that is imported meanwhile.
        for name, module in modules.items():
            sys.modules[name] = module
            stack.callback(sys.modules.pop, name)
        stack.enter_context(mock.patch.object(hub_kernels, "load_and_register_attn_kernel", lambda *_, **__: real))
        stack.enter_context(mock.patch.object(dispatch, "_loaded_implementation", None))
        stack.enter_context(extension.exact(exact))
        if key == HUB:
            ALL_ATTENTION_FUNCTIONS[HUB], ALL_MASK_ATTENTION_FUNCTIONS[HUB] = flash_attention_forward, flash_attention_mask
            stack.callback(ALL_ATTENTION_FUNCTIONS.__delitem__, HUB)
            stack.callback(ALL_MASK_ATTENTION_FUNCTIONS.__delitem__, HUB)
        extension.calls.clear()
        yield extension.calls


def _source(package, file):
    return Path(importlib.util.find_spec(package).origin).parent / file


def _newer(name, source):
    """A module with the functions of a version whose compiled part is out of reach, by their signatures in `source`."""
    module = ModuleType(name)
    module.flash_attn_with_kvcache = lambda q, k_cache, v_cache: None
    for function in ast.parse(source.read_text()).body:
        if isinstance(function, ast.FunctionDef) and function.name in ("flash_attn_func", "flash_attn_varlen_func"):
            for argument in (*function.args.args, *function.args.kwonlyargs):
                argument.annotation = None
            call = f"def {function.name}({ast.unparse(function.args)}):\n    return _call(**locals())"
            space = {"_call": _handing_on(function.name)}
            exec(call, space)
            setattr(module, function.name, space[function.name])
            space["_call"].of.signature = inspect.signature(space[function.name])
    return module


def _handing_on(name):
    of = SimpleNamespace(signature=None)

    def call(**given):
        target = getattr(package(), name)
        known = inspect.signature(target).parameters
        for argument, value in given.items():
            default = of.signature.parameters[argument].default
            assert argument in known or value is default or value == default, f"{argument}={value} is not computed here"
        given = {argument: value for argument, value in given.items() if argument in known}
        # Version 4 has `None` for no window, and finds the longest document by itself.
        given["window_size"] = tuple(-1 if side is None else side for side in given["window_size"])
        for side in "qk":
            if f"cu_seqlens_{side}" in given and f"max_seqlen_{side}" not in given:
                given[f"max_seqlen_{side}"] = int(given[f"cu_seqlens_{side}"].diff().max())
        return target(**given)

    call.of = of
    return call
