"""hf_ulysses: exact Ulysses sequence parallelism for Accelerate, the Transformers Trainer and TRL.

    import hf_ulysses
    hf_ulysses.enable()            # then train as the Hugging Face documentation shows, with a ParallelismConfig

or, in a bare PyTorch loop, `sp = hf_ulysses.attach(model, group)`. Importing has no side effect.
"""

from .attachment import Attachment, attach

__version__ = "0.1.0"
__all__ = ["Attachment", "attach"]
