"""Which module is cut on the way in."""

import torch
from transformers import LlamaForCausalLM

from hf_ulysses.core.entrance import decoder_of

from ..models import config_of


def test_the_decoder_of_a_model_that_is_partitioned_while_it_is_loaded():
    """ZeRO-3 leaves parameters without elements."""
    model = LlamaForCausalLM(config_of("llama"))
    for parameter in model.parameters():
        parameter.ds_numel, parameter.data = parameter.numel(), torch.empty(0)
    assert decoder_of(model) is model.model
