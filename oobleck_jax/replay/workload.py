"""What is trained, on what nodes: all that policies know of it."""

from dataclasses import dataclass, replace

from oobleck_jax.planning.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model with its batch on a kind of node.

    Attributes:
        name: for people.
        profile: costs of the layers.
        num_microbatches: of the global batch.
        sequence_length: tokens of a sample.
        devices_per_node: of each node.
        device_memory_bytes: what a stage may use of each device.
    """

    name: str
    profile: Profile
    num_microbatches: int
    sequence_length: int
    devices_per_node: int = 1
    device_memory_bytes: int

    @property
    def samples_per_step(self) -> int:
        return self.num_microbatches * self.profile.microbatch_size

    @property
    def num_parameters(self) -> int:
        """Float32 parameters, which the profile counts in bytes."""
        return self.parameter_bytes // 4

    @property
    def parameter_bytes(self) -> int:
        return sum(layer.state.parameter_bytes for layer in self.profile.layers) + sum(
            group.state.parameter_bytes for group in self.profile.tied_groups
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of a checkpoint, and of all that a new holder of every layer must get."""
        return sum(layer.state.copied_bytes for layer in self.profile.layers) + sum(
            group.state.copied_bytes for group in self.profile.tied_groups
        )

    def slower(self, factor: float) -> "Workload":
        """Return the workload on nodes that take so many times as long for all that they compute."""
        layers = tuple(
            replace(
                layer,
                costs=tuple(
                    replace(cost, forward_s=cost.forward_s * factor, backward_s=cost.backward_s * factor)
                    for cost in layer.costs
                ),
            )
            for layer in self.profile.layers
        )
        update_s_per_byte = self.profile.update_s_per_byte * factor
        return replace(self, profile=replace(self.profile, layers=layers, update_s_per_byte=update_s_per_byte))
