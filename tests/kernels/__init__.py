""""""

import pytest
import torch

# For tests of stand-ins: with a GPU, the packages take their own kernels.
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins for kernels, on a machine without a GPU")
