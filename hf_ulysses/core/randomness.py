"""Random streams: what is drawn inside of a layer is each rank's own, everything else the group's.

Peers read the same rows and run the same code, so their random states are equal: collators, generation, noise in a loss, and
what decides the way through a decoder (LayerDrop) are drawn alike. Inside of a layer they work on different tokens and
heads, and would share their dropout masks. Their own streams begin at a number that all draw from the shared one, so that a
layer that is run again in backward, from the states of its first time, draws the same again.
"""

import torch

from .sequence import current_row


def _generators():
    # Dropout draws on the device.
    return [torch, torch.get_device_module()] if torch.accelerator.is_available() else [torch]


def random_states() -> list:
    return [module.get_rng_state() for module in _generators()]


def set_random_states(states) -> None:
    for module, state in zip(_generators(), states):
        module.set_rng_state(state)


class OwnStreams:
    """The hooks around what a decoder calls: `begin` and `end` are for `hooks.around`."""

    def __init__(self, attachment):
        self._attachment, self._shared = attachment, []
        self.needed = None  # Whether anything in the decoder draws; known at its first training forward.

    def begin(self, module, args, kwargs):
        draws = module.training and self.needed and current_row() is not None
        self._shared.append(self._start() if draws else None)

    def end(self, module, args, kwargs, output):
        if self._shared and (states := self._shared.pop()) is not None:
            set_random_states(states)

    def _start(self):
        seed = int(torch.randint(2**62, ()))
        states = random_states()
        torch.manual_seed(seed + self._attachment.rank)
        return states

    def reset(self):
        """Forget forwards that were interrupted."""
        for states in self._shared[:1]:
            if states is not None:
                set_random_states(states)
        self._shared.clear()


def draws(decoder) -> bool:
    """Whether anything in `decoder` draws while it trains: a rate of dropout above zero, or NEFTune's noise."""
    for module in decoder.modules():
        for name, value in vars(module).items():
            is_rate = "drop" in name.lower() or name == "p" and "dropout" in type(module).__name__.lower()
            if type(value) in (int, float) and value > 0 and (is_rate or name == "neftune_noise_alpha"):
                return True
    return False


def called_by(decoder) -> list:
    """What a decoder's own code calls: the members of its module lists, and its children that have no lists."""
    found = []
    for child in decoder.children():
        if isinstance(child, torch.nn.ModuleList):
            found += list(child)
        elif any(isinstance(inner, torch.nn.ModuleList) for inner in child.modules()):
            found += called_by(child)
        else:
            found.append(child)
    return found
