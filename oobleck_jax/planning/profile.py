"""Profiles: what each layer costs on a device, and what it costs to move bytes between nodes.

A profile holds for one model, microbatch size, precision and kind of device. It is measured on the devices present or
estimated from sizes, and travels as JSON. Bytes of a layer exclude what it shares with others by tying; that is
listed once, as a `TiedGroup`, because a stage that holds several of the owners holds it once.
"""

from dataclasses import dataclass

import msgspec

from oobleck_jax.config import Precision, Remat
from oobleck_jax.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """Cost of one microbatch of one layer on some devices of one node."""

    num_devices: int
    forward_s: float
    backward_s: float
    residual_bytes: int  # of each device; kept from forward to backward of a microbatch
    temporary_bytes: int  # of each device; needed by a program of the layer while it runs


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes that live as long as the run, summed over the devices that share them."""

    parameter_bytes: int
    gradient_bytes: int  # of the float32 sums; also what holders exchange once per step
    optimizer_bytes: int
    rounded_bytes: int = 0  # of the copy of the parameters that layers compute with, where there is one

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.rounded_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes that a new holder must get from an old one."""
        return self.parameter_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProfile:
    """One layer. Layers of equal kind have equal costs."""

    kind: str
    costs: tuple[LayerCost, ...]  # one for each number of devices that was measured, ascending
    state: StateBytes
    output_bytes: int  # of one microbatch: the activation that goes on, and the gradient that comes back

    def cost_on(self, num_devices: int) -> LayerCost | None:
        return next((cost for cost in self.costs if cost.num_devices == num_devices), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class TiedGroup:
    """Parameters that several layers own together."""

    name: str
    layers: tuple[int, ...]  # the owners, ascending
    state: StateBytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """How long bytes take: latency plus bytes at a rate."""

    bytes_per_s: float
    latency_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Costs of all layers of a model on one kind of device."""

    device: str  # what the costs hold for, for people
    source: str  # "measured", or how they were estimated
    microbatch_size: int
    precision: Precision
    remat: Remat
    layers: tuple[LayerProfile, ...]
    tied_groups: tuple[TiedGroup, ...]
    link: Rate  # an activation or layer state from one node to another
    sum: Rate  # bytes that a node sends in a sum over its holders
    tensor_parallel: bool = False  # each device of a stage has whole activations
    update_s_per_byte: float = 0.0  # of gradients: to gather, check and apply them, once per step

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def sum_s(self, num_bytes: int, num_holders: int) -> float:
        """Return the seconds to sum `num_bytes` over holders by a ring, where each sends 2 (h - 1) / h of them."""
        if num_holders < 2:
            return 0.0
        return 2 * (num_holders - 1) * self.sum.seconds(num_bytes / num_holders)


def num_batch_shares(batch_size: int, num_devices: int, *, tensor_parallel: bool) -> int:
    """Return into how many parts devices of a stage share a microbatch; 1: each has it whole."""
    return 1 if tensor_parallel or batch_size % num_devices else num_devices


def profile_to_json(profile: Profile) -> bytes:
    """Return a profile as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1)


def profile_from_json(data: bytes | str) -> Profile:
    """Return the profile that `profile_to_json` wrote.

    Raises:
        PlanError: not a profile, or one that breaks a rule.
    """
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except msgspec.DecodeError as error:
        raise PlanError(f"not a profile: {error}; make one with scripts/profile.py") from error
    try:
        check_profile(profile)
    except PlanError as error:
        raise PlanError(f"damaged: {error}; make another with scripts/profile.py") from None
    return profile


def check_profile(profile: Profile) -> None:
    """Check that a profile has layers with costs, positive rates, and groups of existing layers.

    Raises:
        PlanError: a rule is broken; the message names the layer.
    """
    if not profile.layers:
        raise PlanError("the profile has no layer")
    for number, layer in enumerate(profile.layers):
        counts = [cost.num_devices for cost in layer.costs]
        if not counts or counts != sorted(set(counts)) or counts[0] < 1:
            raise PlanError(f"layer {number} ({layer.kind}) has costs for {counts} devices; they must ascend from 1 on")
        sizes = (layer.output_bytes, *(size for cost in layer.costs for size in _numbers(cost)), *_state(layer.state))
        if min(sizes) < 0:
            raise PlanError(f"layer {number} ({layer.kind}) has a negative time or size")
    for group in profile.tied_groups:
        if list(group.layers) != sorted(set(group.layers)) or not set(group.layers) <= set(range(profile.num_layers)):
            raise PlanError(f"tied group {group.name} lists layers {group.layers} of {profile.num_layers}")
    if min(profile.link.bytes_per_s, profile.sum.bytes_per_s) <= 0:
        raise PlanError("link and sum need rates above 0 bytes per second")
    if profile.update_s_per_byte < 0:
        raise PlanError(f"updates take {profile.update_s_per_byte} seconds per byte; they cannot take less than none")


def _numbers(cost: LayerCost) -> tuple[float, ...]:
    return (cost.forward_s, cost.backward_s, cost.residual_bytes, cost.temporary_bytes)


def _state(state: StateBytes) -> tuple[int, ...]:
    return (state.parameter_bytes, state.gradient_bytes, state.optimizer_bytes, state.rounded_bytes)
