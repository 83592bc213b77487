"""TRL's trainers hold more models than the one they train: references, teachers. They are attached before they are used.

TRL prepares them in its own ways (`prepare_deepspeed`, `prepare_fsdp`, `Accelerator.prepare_model`), or does not, as when
log-probabilities are computed ahead while the trainer is built; what they have in common is that the trainer holds them.
"""

import functools

import torch

from ..core.attachment import attachment_of
from .accelerate import attach_prepared

# The methods in which a trainer runs models; those that it has.
_RUN_MODELS = ("training_step", "prediction_step", "compute_loss", "compute_ref_log_probs")


def of_trl(trainer) -> bool:
    return any(cls.__module__.partition(".")[0] == "trl" for cls in type(trainer).__mro__)


def attach_what_it_holds(trainer) -> None:
    """Shadow the methods of one trainer that run models: what it holds then is attached first."""
    for name in _RUN_MODELS:
        if hasattr(trainer, name):
            setattr(trainer, name, _attached(trainer, getattr(trainer, name)))


def _attached(trainer, method):
    @functools.wraps(method)
    def with_attached_models(*args, **kwargs):
        for held in list(vars(trainer).values()):
            if isinstance(held, torch.nn.Module):
                model = trainer.accelerator.unwrap_model(held, keep_torch_compile=False)
                # A head of one's own, a loss: they are given whole rows.
                if hasattr(model, "get_input_embeddings") and attachment_of(model) is None:
                    attach_prepared(trainer.accelerator, model, held)
        return method(*args, **kwargs)

    return with_attached_models
