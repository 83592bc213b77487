"""What the switches are set to: plain values, the same on every rank."""

from dataclasses import dataclass, replace

# Where only "on" was said. An MLP's three intermediate tensors are 10 hidden states wide together, a norm's float32
# copies 4 to 6: cut by 8, neither is the peak of its layer any more, and each tile still fills a GPU.
TILES = 8


_OFF = dict(tiled_loss=False, tiled_mlp=False, tiled_norms=False, offload_checkpoints=False, head_chunks=1)
_MAX = dict(tiled_loss=True, tiled_mlp=True, tiled_norms=True, offload_checkpoints=True, head_chunks="auto")


@dataclass(frozen=True)
class Settings:
    """The memory switches. `None`: off, or what `memory` says.

    Args:
        tiled_loss (`bool`, `int` or `"auto"`): `True`: tiles of 128 MiB of float32 logits; a number: that many tiles;
            "auto": as `True`, where logits would be larger than 1 GiB and the head can be tiled.
        tiled_mlp, tiled_norms (`bool` or `int`): `True`: 8 tiles; or their number. The same on every rank whatever the
            length of its row, because under ZeRO-3 every tile is a gather.
        offload_checkpoints (`bool`): needs gradient checkpointing.
        head_chunks (`int` or `"auto"`): chunks of heads per attention layer; 1 is off, "auto" as many as keep key/value
            heads whole and every rank's load even.
        memory (`str`, *optional*): "max" switches on all that nothing is said of.

    Raises:
        ValueError: a value of another kind.
    """

    tiled_loss: bool | int | str | None = None
    tiled_mlp: bool | int | None = None
    tiled_norms: bool | int | None = None
    offload_checkpoints: bool | None = None
    head_chunks: int | str | None = None
    memory: str | None = None

    def __post_init__(self):
        if self.memory not in (None, "max"):
            raise ValueError(f"memory must be None or 'max', but got {self.memory!r}.")
        for name in ("tiled_loss", "tiled_mlp", "tiled_norms", "head_chunks"):
            value, auto = getattr(self, name), name in ("tiled_loss", "head_chunks")
            number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not (value is None or number or auto and value == "auto" or isinstance(value, bool) and name != "head_chunks"):
                kinds = {"tiled_loss": "True, False, 'auto' or", "head_chunks": "'auto' or"}.get(name, "True, False or")
                raise ValueError(f"{name} must be {kinds} a number of at least 1, but got {value!r}.")
        if not isinstance(self.offload_checkpoints, (bool, type(None))):
            raise ValueError(f"offload_checkpoints must be True or False, but got {self.offload_checkpoints!r}.")

    def resolved(self) -> "Settings":
        """With everything said: what is off, what `memory` switches on, and a number of tiles where it does not depend on the model."""
        default = _MAX if self.memory == "max" else _OFF
        said = {name: getattr(self, name) for name in _OFF if getattr(self, name) is not None}
        settings = Settings(**{**default, **said})
        tiles = {name: TILES for name in ("tiled_mlp", "tiled_norms") if getattr(settings, name) is True}
        return replace(settings, **tiles)

    def __str__(self):
        """For the line at the start: what is on, empty if nothing is."""
        settings = self.resolved()
        on = [f"{name}={getattr(settings, name)}" for name, off in _OFF.items() if getattr(settings, name) != off]
        return f" | {' '.join(on)}" if on else ""
