"""Random streams: dropout of single elements is each rank's own, everything else is drawn alike by the ranks of a group.

Peers read the same rows and run the same code, so their random states are equal outside of the decoder: collators,
generation, noise in a loss. Inside of it they work on different tokens and heads, and would share their dropout masks.
"""

import torch


def _generators():
    # Dropout draws on the device.
    return [torch, torch.get_device_module()] if torch.accelerator.is_available() else [torch]


def random_states() -> list:
    return [module.get_rng_state() for module in _generators()]


def set_random_states(states) -> None:
    for module, state in zip(_generators(), states):
        module.set_rng_state(state)


class OwnStream:
    """A stream of one rank's own, between `begin` and `end`; the shared one goes on after it as if nothing had been drawn."""

    def __init__(self, rank: int):
        self._rank, self._own, self._shared = rank, None, None

    def begin(self) -> None:
        self._shared = random_states()
        if self._own is None:
            torch.manual_seed(torch.initial_seed() + self._rank)
        else:
            set_random_states(self._own)

    def end(self) -> None:
        if self._shared is not None:
            self._own = random_states()
            set_random_states(self._shared)
            self._shared = None
