"""Checkpoint offload: what gradient checkpointing keeps of each layer, its input, lives in CPU memory until backward.

A thin layer over torch's saved-tensor hooks, around the call of each layer's checkpoint function, where the layer's input
is the only hidden state that is saved (what the layer itself saves, checkpointing drops). Found through the attribute in which transformers' layers
and torch's wrappers keep that function, at the beginning of each forward, because it may be set at any time.

1. Forward copies an input to the host on a stream of its own; the device's copy goes when the next layer's is on its way.
2. Backward asks for the last input first and, with it, begins to bring the one before.
3. Host buffers are kept for the next step. They are pinned where they lie, with the size they have: torch's pinned
   allocator rounds sizes up to powers of two, which at 5M tokens is 2 TiB instead of 1.2.

Without an accelerator a plain copy. Why neither `save_on_cpu` nor TRL's `OffloadActivations` is used: docs/memory.md.
"""

import functools
import weakref

import torch

from ..core.entrance import decoder_of
from ..core.hooks import around

_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")
# Smaller tensors are not worth a copy.
_SMALLEST = 1024


def offload_checkpoints(model) -> list:
    """Keep the inputs of `model`'s checkpointed layers in CPU memory. Returns handles.

    Raises:
        ValueError: in a training forward in which no layer is checkpointed.
    """
    decoder, host = decoder_of(model), Host()

    def enter(module, args, kwargs):
        if not (module.training and torch.is_grad_enabled()):
            return
        if not sum(_wrap(layer, host) for layer in module.modules()):
            raise ValueError(
                f"offload_checkpoints=True, but no layer of {type(module).__name__} is checkpointed, so there is nothing "
                "to offload: set gradient_checkpointing=True, or offload_checkpoints=False."
            )

    return [*around(decoder, enter, lambda *_: None), _Wrapped(decoder, host)]


def _wrap(module, host) -> bool:
    """Wrap the function that checkpoints `module`; whether it has one."""
    found = False
    for name in _ATTRIBUTES:
        function = vars(module).get(name)
        if function is None or not getattr(module, "gradient_checkpointing", True):
            continue
        found = True
        if not any(isinstance(part, _Offloading) for part in _chain(function)):
            setattr(module, name, _Offloading(function, host))
    return found


def _chain(function):
    """A checkpoint function and those that it wraps."""
    while function is not None:
        yield function
        function = getattr(function, "function", None)


class _Wrapped:
    """The handle of what `_wrap` did to the layers of a decoder."""

    def __init__(self, decoder, host):
        self._decoder, self.host = weakref.ref(decoder), host

    def remove(self):
        decoder = self._decoder()
        for module in () if decoder is None else decoder.modules():
            for name in _ATTRIBUTES:
                outer = None
                for part in _chain(vars(module).get(name)):
                    if isinstance(part, _Offloading):
                        setattr(*((module, name) if outer is None else (outer, "function")), part.function)
                    outer = part


class _Offloading:
    """A checkpoint function, `function(run, *args, **kwargs)`, whose first floating-point argument lives on the host."""

    def __init__(self, function, host):
        self.function, self._host = function, host

    def __deepcopy__(self, memo):
        return _Offloading(self.function, Host())

    def __call__(self, run, *args, **kwargs):
        hidden = next((arg for arg in args if torch.is_tensor(arg) and arg.is_floating_point()), None)
        if hidden is None or hidden.nbytes < _SMALLEST or not torch.is_grad_enabled():
            return self.function(run, *args, **kwargs)

        # What is saved keeps both functions, which therefore must not know the tensor. Masks and tables, which all layers
        # share, stay.
        pack = functools.partial(_pack, self._host, hidden.shape, hidden.dtype)
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return self.function(run, *args, **kwargs)


def _pack(host, shape, dtype, tensor):
    return host.keep(tensor) if tensor.shape == shape and tensor.dtype == dtype else tensor


def _unpack(kept):
    return kept.bring() if isinstance(kept, _Kept) else kept


class Host:
    """Buffers in CPU memory, and the stream that copies to and from them.

    Attributes:
        buffers (`list[torch.Tensor]`): those that are free now, one-dimensional, of bytes.
        allocated (`int`): bytes of all buffers that exist.
    """

    def __init__(self):
        self.buffers, self.allocated = [], 0
        self._stream, self._leaving, self._last = None, None, None

    def keep(self, tensor) -> "_Kept":
        """Begin to copy `tensor` to the host."""
        buffer = self._buffer(tensor)
        kept = _Kept(self, tensor, buffer, self._last)
        self._last = weakref.ref(kept)
        if not _has_streams(tensor.device):
            kept.place.copy_(tensor)
            return kept
        here, side = self._streams(tensor.device)
        # One tensor at a time is on its way; the layer that has run since took longer than its copy.
        self._arrive(here)
        side.wait_stream(here)
        with torch.get_device_module(tensor.device).stream(side):
            kept.place.copy_(tensor, non_blocking=True)
        self._leaving = tensor, side.record_event()
        return kept

    def begin(self, kept) -> None:
        """Begin to bring a tensor back; its memory belongs to the stream that will use it."""
        result = torch.empty_strided(kept.shape, kept.stride, dtype=kept.place.dtype, device=kept.device)
        if not _has_streams(kept.device):
            kept.arriving = result.copy_(kept.place), None
            return
        here, side = self._streams(kept.device)
        self._arrive(here)
        side.wait_stream(here)
        with torch.get_device_module(kept.device).stream(side):
            result.copy_(kept.place, non_blocking=True)
        kept.arriving = result, side.record_event()

    def _streams(self, device):
        module = torch.get_device_module(device)
        if self._stream is None:
            self._stream = module.Stream(device)
        return module.current_stream(device), self._stream

    def _arrive(self, here):
        if self._leaving is not None:
            here.wait_event(self._leaving[1])
            self._leaving = None

    def _buffer(self, tensor):
        self.buffers.sort(key=lambda buffer: buffer.nbytes)
        for place, buffer in enumerate(self.buffers):
            if buffer.nbytes >= tensor.nbytes:
                return self.buffers.pop(place)
        if self.buffers:
            # Too small, as all of them: longer rows replace the buffers of shorter ones.
            self.allocated -= self.buffers.pop().nbytes
        # Meta tensors (plans) have nothing that could be copied elsewhere.
        buffer = torch.empty(tensor.nbytes, dtype=torch.uint8, device="meta" if tensor.is_meta else "cpu")
        self.allocated += buffer.nbytes
        if tensor.device.type == "cuda" and type(buffer) is torch.Tensor:
            _pin(buffer)
        return buffer


class _Kept:
    """A tensor on the host; its buffer is free again when nobody can ask for it any more."""

    def __init__(self, host, tensor, buffer, before):
        self.shape, self.stride, self.device = tensor.shape, tensor.stride(), tensor.device
        # Which is also what broadcast and permuted tensors are copied from and to.
        self.place = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.arriving, self._host, self._before = None, host, before
        weakref.finalize(self, host.buffers.append, buffer).atexit = False

    def bring(self):
        """The tensor on its device again. Begins to bring the one that was kept before it, too."""
        if self.arriving is None:
            self._host.begin(self)
        (result, event), self.arriving = self.arriving, None
        if event is not None:
            torch.get_device_module(self.device).current_stream(self.device).wait_event(event)
        before = None if self._before is None else self._before()
        if before is not None and before.arriving is None:
            self._host.begin(before)
        return result


def _has_streams(device):
    return device.type not in ("cpu", "meta") and torch.accelerator.is_available()


def _pin(buffer):
    error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    if int(error):
        raise RuntimeError(
            f"offload_checkpoints: pinning {buffer.nbytes / 2**30:.2f} GiB of CPU memory failed ({error}). Raise the "
            "limit of locked memory (ulimit -l), or train shorter rows."
        )
    # Before the memory goes back to where it came from.
    weakref.finalize(buffer, torch.cuda.cudart().cudaHostUnregister, buffer.data_ptr()).atexit = False
