"""Tables of what any run of layers costs on any number of devices, in whole nanoseconds and bytes.

Memory of a stage, on each of its devices: the state of its layers; what they keep of each microbatch in flight; what
the largest program needs while it runs; and activations on their way (`_passing_bytes`). Where a stage is computed
again (`Remat.STAGE`) only its input stays of a microbatch, but what the layers keep of one must fit, too.

Planning is done with integers: sums do not depend on their order, and two candidates that are equally good are
exactly equal, so that all machines and Python versions choose the same one.
"""

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from oobleck_jax.config import Remat
from oobleck_jax.errors import PlanError
from oobleck_jax.planning.profile import LayerCost, Profile, num_batch_shares


Ints: TypeAlias = NDArray[np.int64]

NS_PER_S = 1e9
UNLIMITED = 1 << 30  # microbatches in flight, where memory sets no limit
NEVER = 1 << 60  # nanoseconds, where something is impossible


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class Costs:
    """Tables over runs of layers `[first, end)`; index them by `[first, end]` or `[devices, first, end]`.

    Axis `devices` runs over `device_counts`. Times are of one microbatch.
    """

    num_layers: int
    devices_per_node: int
    device_counts: tuple[int, ...]  # what a stage may have: powers of two up to devices_per_node, ascending
    forward_ns: Ints
    backward_ns: Ints
    weight_ns: Ints  # of the backward, what can wait where it is split (`ScheduleKind.ZB_H1`)
    state_bytes: Ints  # parameters, gradients and optimizer state, over all devices of the stage
    gradient_bytes: Ints
    residual_bytes: Ints  # of each device, for one microbatch
    temporary_bytes: Ints  # of each device, with `passing_bytes`
    passing_bytes: Ints  # of each device: activations, and gradients of them, on their way
    in_flight_limit: Ints  # microbatches that fit between forward and backward; 0: the run does not fit
    link_ns: Ints  # [end]: time of the activation from layer end-1 to a stage on another node; 0 for the last layer
    sum_ns: Ints  # [first, end]: time to sum the gradients over many holders
    layer_classes: tuple[int, ...]  # equal for layers that are equal in every respect

    @property
    def work_ns(self) -> Ints:
        """Forward and backward together."""
        return self.forward_ns + self.backward_ns

    def with_device_count(self, devices: int) -> "Costs":
        """Return the tables for stages of one device count only; `devices` indexes `device_counts`."""
        only = slice(devices, devices + 1)
        return replace(
            self,
            device_counts=self.device_counts[only],
            forward_ns=self.forward_ns[only],
            backward_ns=self.backward_ns[only],
            weight_ns=self.weight_ns[only],
            residual_bytes=self.residual_bytes[only],
            temporary_bytes=self.temporary_bytes[only],
            passing_bytes=self.passing_bytes[only],
            in_flight_limit=self.in_flight_limit[only],
        )

    def memory_bytes(self, devices: int, first: int, end: int, num_in_flight: int) -> int:
        """Return the peak memory of each device of a stage; `devices` indexes `device_counts`."""
        state = -(-int(self.state_bytes[first, end]) // self.device_counts[devices])
        residual = int(self.residual_bytes[devices, first, end]) * num_in_flight
        return state + residual + int(self.temporary_bytes[devices, first, end])


def tabulate(profile: Profile, *, devices_per_node: int, num_microbatches: int, device_memory_bytes: int) -> Costs:
    """Return the tables for a kind of node.

    Args:
        profile: costs of the layers.
        devices_per_node: a stage has a power of two of them.
        num_microbatches: the most that a pipeline may be given; more are never in flight.
        device_memory_bytes: what a stage may use of each device.

    Raises:
        PlanError: the profile lacks costs for one device.
    """
    counts = _device_counts(profile, devices_per_node)
    costs = [[_cost(profile, layer, count) for layer in range(profile.num_layers)] for count in counts]
    forward_ns = np.stack([_range_sums([round(cost.forward_s * NS_PER_S) for cost in row]) for row in costs])
    backward_ns = np.stack([_range_sums([round(cost.backward_s * NS_PER_S) for cost in row]) for row in costs])
    weight_ns = np.stack([_range_sums(_weights_ns(row)) for row in costs])
    residual_bytes = np.stack([_range_sums([cost.residual_bytes for cost in row]) for row in costs])
    temporary_bytes = np.stack([_range_maxima([cost.temporary_bytes for cost in row]) for row in costs])
    input_bytes = np.stack([_input_bytes(profile, row) for row in costs])
    passing_bytes = np.stack([_passing_bytes(inputs) for inputs in input_bytes])
    temporary_bytes += passing_bytes
    if profile.remat is Remat.STAGE:
        is_again = np.arange(profile.num_layers + 1) < profile.num_layers  # by end: the last stage goes back at once
        temporary_bytes += np.where(is_again, residual_bytes, 0)
        backward_ns += np.where(is_again, forward_ns, 0)
        residual_bytes = np.where(
            is_again, np.triu(np.broadcast_to(input_bytes[:, :, None], residual_bytes.shape), 1), residual_bytes
        )
    state_bytes = _state_sums(profile, [layer.state.total_bytes for layer in profile.layers], "total_bytes")
    gradient_bytes = _state_sums(profile, [layer.state.gradient_bytes for layer in profile.layers], "gradient_bytes")
    divided = -(-state_bytes // np.array(counts)[:, None, None])
    room = device_memory_bytes - divided - temporary_bytes
    limit = np.where(residual_bytes > 0, room // np.maximum(residual_bytes, 1), UNLIMITED)
    # No more are ever in flight than there are stages, so than there are layers.
    limit = np.where(limit >= min(num_microbatches, profile.num_layers), UNLIMITED, limit)
    is_run = np.triu(np.ones_like(state_bytes, dtype=bool), 1)
    link_ns = [0, *(round(profile.link.seconds(layer.output_bytes) * NS_PER_S) for layer in profile.layers)]
    link_ns[-1] = 0
    return Costs(
        num_layers=profile.num_layers,
        devices_per_node=devices_per_node,
        device_counts=counts,
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        weight_ns=weight_ns,
        state_bytes=state_bytes,
        gradient_bytes=gradient_bytes,
        residual_bytes=residual_bytes,
        temporary_bytes=temporary_bytes,
        passing_bytes=passing_bytes,
        in_flight_limit=np.where(is_run & (room >= 0), limit, 0),
        link_ns=np.array(link_ns, dtype=np.int64),
        sum_ns=np.rint(2 * gradient_bytes / profile.sum.bytes_per_s * NS_PER_S).astype(np.int64),
        layer_classes=_layer_classes(profile),
    )


def _device_counts(profile: Profile, devices_per_node: int) -> tuple[int, ...]:
    powers = [1 << power for power in range(devices_per_node.bit_length())]
    counts = tuple(count for count in powers if all(layer.cost_on(count) is not None for layer in profile.layers))
    if not counts:
        raise PlanError(
            f"the profile has costs for {[cost.num_devices for cost in profile.layers[0].costs]} devices, but none for "
            f"a power of two up to --devices-per-node {devices_per_node}; profile again with that flag"
        )
    return counts


def _cost(profile: Profile, layer: int, num_devices: int) -> LayerCost:
    cost = profile.layers[layer].cost_on(num_devices)
    assert cost is not None
    return cost


def _weights_ns(costs: list[LayerCost]) -> list[int]:
    """Return for each layer how much of its backward computes gradients of weights.

    Nobody waits for the gradient of tokens, so of the first layer it is all; the last one computes everything at once.
    Elsewhere it is what the forward takes, whose products are as large, but at most half: the gradient of the input has
    those, too.
    """
    times = [(round(cost.forward_s * NS_PER_S), round(cost.backward_s * NS_PER_S)) for cost in costs]
    return [times[0][1], *(min(forward, backward // 2) for forward, backward in times[1:-1]), 0][: len(costs)]


def _input_bytes(profile: Profile, costs: list[LayerCost]) -> Ints:
    """Return the bytes of the input of each layer on one device, and of the targets, which the last one takes, too.

    Tokens and targets are as large; what the first layer keeps is not less, and its output is far more.
    """
    num_shares = num_batch_shares(
        profile.microbatch_size, costs[0].num_devices, tensor_parallel=profile.tensor_parallel
    )
    outputs = [-(-layer.output_bytes // num_shares) for layer in profile.layers]
    tokens = min(costs[0].residual_bytes, outputs[0])
    return np.array([tokens, *outputs[:-1], tokens], dtype=np.int64)


def _passing_bytes(inputs: Ints) -> Ints:
    """Return the table of activations, and gradients of them, that are there while a stage runs a program.

    At each end of the stage the one at work, and the next one that has come or the last one that has not been fetched
    yet; one more at one end, since both can be; and within the stage what a program takes and gives.
    """
    within = np.zeros((len(inputs), len(inputs)), dtype=np.int64)
    within[:-1] = _range_maxima(inputs[:-1].tolist())[1:]
    ends = 2 * (inputs[:, None] + inputs) + np.maximum(inputs[:, None], inputs)
    return np.triu(ends + 2 * within, 1)


def _range_sums(values: list[int]) -> Ints:
    """Return the table of sums over `[first, end)`; 0 where that is empty or reversed."""
    sums = np.concatenate([[0], np.cumsum(np.array(values, dtype=np.int64))])
    return np.triu(sums[None, :] - sums[:, None])


def _range_maxima(values: list[int]) -> Ints:
    size = len(values) + 1
    table = np.zeros((size, size), dtype=np.int64)
    for first in range(len(values)):
        table[first, first + 1 :] = np.maximum.accumulate(np.array(values[first:], dtype=np.int64))
    return table


def _state_sums(profile: Profile, own_bytes: list[int], attribute: str) -> Ints:
    """Sum the bytes of a run's layers, and once those of each tied group that has an owner in the run."""
    table = _range_sums(own_bytes)
    for group in profile.tied_groups:
        owners = _range_sums([int(layer in group.layers) for layer in range(profile.num_layers)])
        table = table + np.where(owners > 0, int(getattr(group.state, attribute)), 0)
    return table


def _layer_classes(profile: Profile) -> tuple[int, ...]:
    input_bytes = [0, *(layer.output_bytes for layer in profile.layers)]
    descriptions = [
        (
            *(layer.costs, layer.state, input_bytes[number], layer.output_bytes),
            tuple(group.name for group in profile.tied_groups if number in group.layers),
        )
        for number, layer in enumerate(profile.layers)
    ]
    numbers = {description: number for number, description in reversed(list(enumerate(descriptions)))}
    return tuple(numbers[description] for description in descriptions)
