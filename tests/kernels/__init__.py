"""Kernels that need a GPU, replaced by references on a CPU, as low down as can be: everything above is the real package."""

import pytest
import torch

# For tests of stand-ins: with a GPU, the packages take their own kernels.
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins for kernels, on a machine without a GPU")
