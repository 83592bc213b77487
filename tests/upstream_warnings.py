"""Deprecation warnings of the libraries below us are errors in our tests; each exception is named with its reason."""

import warnings
from contextlib import contextmanager

# (message pattern, category, reason)
EXCEPTIONS = [
    ("`gradient_checkpointing` is deprecated", FutureWarning, "set by default in SFTConfig of TRL 1.16"),
    ("`gradient_checkpointing_kwargs` is deprecated", FutureWarning, "the name that transformers 5.0 knows"),
    ("`label_smoothing_factor` is deprecated in `SFTTrainer`", FutureWarning, "still there in TRL 1.16, so tested"),
    ("`loss_type='chunked_nll'` is deprecated", FutureWarning, "still there in TRL 1.16, so tested"),
    ("`return_outputs=True`, and the logits it passes", FutureWarning, "TRL 1.16's own way to compute_metrics"),
    ("`torch.jit.script", DeprecationWarning, "torch's own mkldnn module, imported by DeepSpeed"),
    ("`torch.distributed.all_gather_into_tensor", FutureWarning, "called by DeepSpeed and Accelerate"),
    ("`torch.distributed.reduce_scatter_tensor", FutureWarning, "called by DeepSpeed and FSDP2"),
    ("`torch.distributed._all_gather_base", FutureWarning, "called by DeepSpeed"),
    ("`torch.distributed._reduce_scatter_base", FutureWarning, "called by DeepSpeed"),
    ("`is_gradient_checkpointing` is deprecated", FutureWarning, "read by PEFT 0.21"),
    (
        ".*Function'> should not be instantiated",
        DeprecationWarning,
        "torch.compile does while it traces autograd functions",
    ),
    ("`past_key_values` is deprecated and will be removed.*LlamaModel.forward", FutureWarning, "passed by Liger 0.8"),
    ("_compile flag on create_block_mask", DeprecationWarning, "set by transformers where it makes flex masks"),
]


@contextmanager
def warnings_are_errors():
    """Make deprecation warnings errors, but for `EXCEPTIONS`, inside the `with` block."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("error", category=category)
        for message, category, _ in EXCEPTIONS:
            warnings.filterwarnings("ignore", message=message, category=category)
        yield
