"""hf_ulysses: exact Ulysses sequence parallelism for Accelerate, the Transformers Trainer and TRL.

    import hf_ulysses
    hf_ulysses.enable()            # then train as the Hugging Face documentation shows, with a ParallelismConfig

or nothing in the script at all: `accelerate launch --config_file Y -m hf_ulysses SCRIPT ARGS`; or, in a bare PyTorch
loop, `sp = hf_ulysses.attach(model, group)`. Importing has no side effect and loads none of these libraries.
"""

from .core.attachment import Attachment, attach
from .core.declared import sums_over_tokens
from .door import disable, enable, enabled

__version__ = "0.1.0"
__all__ = [
    "Attachment",
    "ParallelismConfig",
    "SequenceParallelConfig",
    "attach",
    "disable",
    "enable",
    "enabled",
    "sums_over_tokens",
]


def __getattr__(name):
    if name in ("ParallelismConfig", "SequenceParallelConfig"):
        from .adapters import config

        return getattr(config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
