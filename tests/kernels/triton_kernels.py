"""Triton's kernels in Triton's interpreter: real ones of Liger and TRL, on a CPU. Set TRITON_INTERPRET=1 first (ranks.py)."""

import contextlib
from collections import Counter
from unittest import mock


@contextlib.contextmanager
def interpreted():
    """Inside, kernels run on a CPU. Gives a `Counter` of the kernels that have run, by name.

    Liger's patches of a modelling file are undone at the end, which Liger itself cannot.
    """
    import numpy
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from transformers.models.llama import modeling_llama
    from triton.runtime import interpreter

    convert, run, calls = interpreter._implicit_cvt, interpreter.GridExecutor.__call__, Counter()

    def with_floats(argument):
        """A compiled kernel has a scalar tensor for a float; the interpreter of Triton 3.9 forgets them."""
        if isinstance(argument, float):
            argument = interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32)
            return tl.tensor(argument, tl.float32)
        return convert(argument)

    def counting(self, *args, **kwargs):
        calls[self.fn.__name__] += 1
        return run(self, *args, **kwargs)

    with (
        mock.patch.dict(vars(modeling_llama)),
        # A function of CUDA's library, which gives `None` in the interpreter.
        mock.patch.object(rms_norm, "rsqrt", lambda x: tl.rsqrt(x)),
        mock.patch.object(interpreter, "_implicit_cvt", with_floats),
        mock.patch.object(interpreter.GridExecutor, "__call__", counting),
    ):
        yield calls


@contextlib.contextmanager
def trl_kernels():
    """The same, where TRL takes its kernels on a GPU only."""
    import trl.kernels.chunked_logprob as chunked

    with interpreted() as calls, mock.patch.object(chunked, "_use_triton", lambda device: True):
        yield calls
