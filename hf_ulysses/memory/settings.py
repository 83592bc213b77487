"""What the switches are set to: plain values, the same on every rank."""

from dataclasses import dataclass, fields, replace

# Where only "on" was said. An MLP's three intermediate tensors are 10 hidden states wide together, a norm's float32
# copies 4 to 6: cut by 8, neither is the peak of its layer any more, and each tile still fills a GPU.
TILES = 8


@dataclass(frozen=True)
class Settings:
    """The memory switches; all off by default.

    Args:
        tiled_loss (`bool`, `int` or `"auto"`): `True`: tiles of 128 MiB of float32 logits; a number: that many tiles;
            "auto": as `True`, where logits would be larger than 1 GiB and the head can be tiled.
        tiled_mlp, tiled_norms (`bool` or `int`): `True`: 8 tiles; or their number. The same on every rank whatever the
            length of its row, because under ZeRO-3 every tile is a gather.
        offload_checkpoints (`bool`): needs gradient checkpointing.
        head_chunks (`int` or `"auto"`): chunks of heads per attention layer; 1 is off, "auto" as many as keep key/value
            heads whole and every rank's load even.
        memory (`str`, *optional*): "max" switches on all that is off.

    Raises:
        ValueError: a value of another kind.
    """

    tiled_loss: bool | int | str = False
    tiled_mlp: bool | int = False
    tiled_norms: bool | int = False
    offload_checkpoints: bool = False
    head_chunks: int | str = 1
    memory: str | None = None

    def __post_init__(self):
        if self.memory not in (None, "max"):
            raise ValueError(f"memory must be None or 'max', but got {self.memory!r}.")
        for name in ("tiled_loss", "tiled_mlp", "tiled_norms", "head_chunks"):
            value, auto = getattr(self, name), name in ("tiled_loss", "head_chunks")
            number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not (number or auto and value == "auto" or isinstance(value, bool) and name != "head_chunks"):
                kinds = {"tiled_loss": "True, False, 'auto' or", "head_chunks": "'auto' or"}.get(name, "True, False or")
                raise ValueError(f"{name} must be {kinds} a number of at least 1, but got {value!r}.")
        if not isinstance(self.offload_checkpoints, bool):
            raise ValueError(f"offload_checkpoints must be True or False, but got {self.offload_checkpoints!r}.")

    def resolved(self) -> "Settings":
        """With `memory="max"` written out, and a number of tiles where one is known without the model."""
        settings = self
        if self.memory == "max":
            settings = replace(
                self,
                tiled_loss=self.tiled_loss or True,
                tiled_mlp=self.tiled_mlp or True,
                tiled_norms=self.tiled_norms or True,
                offload_checkpoints=True,
                head_chunks="auto" if self.head_chunks == 1 else self.head_chunks,
            )
        tiles = {name: TILES for name in ("tiled_mlp", "tiled_norms") if getattr(settings, name) is True}
        return replace(settings, memory=None, **tiles)

    def __str__(self):
        """For the line at the start: what is on, empty if nothing is."""
        settings = self.resolved()
        on = [f"{f.name}={getattr(settings, f.name)}" for f in fields(self) if getattr(settings, f.name) != f.default]
        return f" | {' '.join(on)}" if on else ""
