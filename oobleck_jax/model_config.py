"""What the configuration of a model must offer; free of jax, so that every process can read it."""

from typing import TYPE_CHECKING, Protocol


if TYPE_CHECKING:
    from oobleck_jax.model import LayeredModel


class ModelConfig(Protocol):
    """The configuration of a model: a frozen dataclass of plain values that can build it.

    `build` must not depend on anything but the fields. Reading the properties must not import jax.
    """

    @property
    def num_layers(self) -> int:
        """Number of layers in the sense of `LayeredModel`, embedding and head included."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_sequence_length(self) -> int: ...

    def build(self) -> "LayeredModel": ...
