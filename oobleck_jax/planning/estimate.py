"""Profiles without measuring: times from counts of operations, bytes from counts of numbers.

Good enough to plan for devices that one does not have, and to have a first plan before a profile is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from oobleck_jax.config import Precision, Remat
from oobleck_jax.planning.plan import MAX_SPAN_LAYERS
from oobleck_jax.planning.profile import LayerCost, LayerProfile, Profile, Rate, StateBytes, TiedGroup, num_batch_shares


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSize:
    """What a layer computes and keeps, for one sequence."""

    kind: str
    num_parameters: int  # not counting tied ones
    num_tied_parameters: int = 0
    forward_flops: int  # floating-point operations; a multiplication and an addition are two
    num_outputs: int  # numbers that go on to the next layer
    num_residuals: int  # numbers kept for the backward pass
    num_temporaries: int  # numbers alive at once while it runs
    is_recomputed: bool = True  # in the backward pass, by remat "layer"; layers at the ends never are


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRates:
    """Rates that a device reaches in practice."""

    name: str
    flops_per_s: float  # floating-point operations in matmuls, at the precision of the run
    memory_bytes_per_s: float  # of the device's memory
    node_bytes_per_s: float  # between devices of one node
    link: Rate  # between nodes, one message
    sum: Rate  # between nodes, in a sum


LAPTOP_RATES = DeviceRates(
    name="cpu core",
    flops_per_s=5e10,
    memory_bytes_per_s=1e10,
    node_bytes_per_s=1e10,
    link=Rate(bytes_per_s=1e9, latency_s=2e-4),
    sum=Rate(bytes_per_s=1e9, latency_s=2e-4),
)


def gpt_sizes(
    *,
    num_blocks: int,
    width: int,
    num_heads: int,
    vocab_size: int,
    sequence_length: int,
    remat: Remat,
    logits_at_once: int | None = None,
) -> tuple[LayerSize, ...]:
    """Return the sizes of a GPT-2: embedding (token and position), blocks, head (norm and tied projection).

    Operations are counted as in Narayanan et al. 2021 (section 5.1), kept numbers as in Korthikanti et al. 2022
    (section 4.1), without dropout.

    Args:
        logits_at_once: how many exist at a time, of each sequence; None: all.
    """
    tokens = sequence_length * width
    scores = num_heads * sequence_length**2
    kept_of_block = {Remat.NONE: 16 * tokens + 2 * scores, Remat.DOTS: 10 * tokens, Remat.LAYER: tokens}
    embedding = LayerSize(
        kind="embedding",
        num_parameters=sequence_length * width,
        num_tied_parameters=vocab_size * width,
        forward_flops=tokens,
        num_outputs=tokens,
        num_residuals=sequence_length,
        num_temporaries=tokens,
        is_recomputed=False,
    )
    block = LayerSize(
        kind="block",
        num_parameters=12 * width**2 + 13 * width,
        forward_flops=24 * tokens * width + 4 * tokens * sequence_length,
        num_outputs=tokens,
        num_residuals=kept_of_block[remat.of_layers],
        num_temporaries=16 * tokens + 2 * scores,
    )
    head = LayerSize(
        kind="head",
        num_parameters=2 * width,
        num_tied_parameters=vocab_size * width,
        forward_flops=2 * tokens * vocab_size,
        num_outputs=0,
        num_residuals=tokens,
        num_temporaries=2 * tokens
        + 2 * min(sequence_length * vocab_size, logits_at_once or sequence_length * vocab_size),
        is_recomputed=False,
    )
    return (embedding, *[block] * num_blocks, head)


def estimate_profile(
    sizes: Sequence[LayerSize],
    *,
    microbatch_size: int,
    precision: Precision = Precision.FLOAT32,
    remat: Remat = Remat.DOTS,
    rates: DeviceRates = LAPTOP_RATES,
    devices_per_node: int = 1,
    tensor_parallel: bool = False,
) -> Profile:
    """Return a profile by closed forms.

    A forward pass takes the longer of its operations and its traffic to memory; a backward pass is two forward passes,
    and a third where the layer is recomputed. Devices of a node share a microbatch perfectly but for gathering the
    layer's parameters, once forward and twice backward; or, tensor parallel, for two sums of the layer's output each
    way, and they have all that is kept whole (an upper bound). Layers with tied parameters share one group.

    Args:
        sizes: of all layers, in order.
        microbatch_size: sequences per microbatch.
        precision: of the run; `rates` are those for it.
        remat: what the sizes assume to be kept.
        rates: of the device and its connections.
        devices_per_node: the profile has costs for each power of two up to this.
        tensor_parallel: devices of a stage share out its products, not the samples of a microbatch.
    """
    counts = [1 << power for power in range(devices_per_node.bit_length())]
    owners = tuple(number for number, size in enumerate(sizes) if size.num_tied_parameters)
    tied = (
        (TiedGroup(name="tied", layers=owners, state=adamw_state(sizes[owners[0]].num_tied_parameters, precision)),)
        if owners
        else ()
    )
    return Profile(
        device=rates.name,
        source="estimated in closed form",
        microbatch_size=microbatch_size,
        precision=precision,
        remat=remat,
        layers=tuple(_layer(size, microbatch_size, precision, remat, rates, counts, tensor_parallel) for size in sizes),
        tied_groups=tied,
        link=rates.link,
        sum=rates.sum,
        update_s_per_byte=update_s_per_byte(rates),
        tensor_parallel=tensor_parallel,
    )


def update_s_per_byte(rates: DeviceRates) -> float:
    """Return the time to gather, check and apply a byte of gradients: 12 passes over memory.

    Gathering reads and writes it, checking reads it twice; AdamW reads gradient, parameter and two moments, and writes
    back the last three, and what clipping makes of the gradient.
    """
    return 12 / rates.memory_bytes_per_s


def _layer(
    size: LayerSize,
    microbatch_size: int,
    precision: Precision,
    remat: Remat,
    rates: DeviceRates,
    counts: Sequence[int],
    tensor_parallel: bool,
) -> LayerProfile:
    width_bytes = precision.bytes_of_activation
    parameter_bytes = width_bytes * (size.num_parameters + size.num_tied_parameters)
    moved_bytes = parameter_bytes + 2 * width_bytes * size.num_temporaries * microbatch_size  # written and read
    forward_s = max(size.forward_flops * microbatch_size / rates.flops_per_s, moved_bytes / rates.memory_bytes_per_s)
    num_scanned = MAX_SPAN_LAYERS if size.is_recomputed else 1
    gradient_bytes = 4 * num_scanned * (size.num_parameters + size.num_tied_parameters)  # before they are added up
    passes = 3 if remat.of_layers is Remat.LAYER and size.is_recomputed else 2

    output_bytes = size.num_outputs * microbatch_size * width_bytes
    alone = LayerCost(
        num_devices=1,
        forward_s=forward_s,
        backward_s=passes * forward_s,
        residual_bytes=size.num_residuals * microbatch_size * width_bytes,
        temporary_bytes=size.num_temporaries * microbatch_size * width_bytes + gradient_bytes,
    )

    def cost(num_devices: int) -> LayerCost:
        return shared_cost(
            alone,
            num_devices,
            microbatch_size=microbatch_size,
            parameter_bytes=parameter_bytes,
            row_bytes=gradient_bytes,
            summed_bytes=output_bytes if tensor_parallel else None,
            is_recomputed=passes > 2,
            rates=rates,
        )

    return LayerProfile(
        kind=size.kind,
        costs=tuple(cost(count) for count in counts),
        state=adamw_state(size.num_parameters, precision),
        output_bytes=output_bytes,
    )


def shared_cost(
    alone: LayerCost,
    num_devices: int,
    *,
    microbatch_size: int,
    parameter_bytes: int,
    row_bytes: int,
    summed_bytes: int | None,
    is_recomputed: bool,
    rates: DeviceRates,
) -> LayerCost:
    """Return the cost of a layer on several devices of a node, from that on one.

    They gather its parameters, once forward and twice backward; or, tensor parallel, they sum activations by a ring,
    twice each way, and twice more where the layer is recomputed (Megatron-LM, section 3).

    Args:
        row_bytes: of the gradients that become rows at once. While they do, each device has them all twice, as XLA
            exchanges what the devices share out in another way, and its part of the rows.
        summed_bytes: of the layer's output, as large as what is summed; where it is 0, parameters are gathered. None:
            the devices are not tensor parallel.
    """
    num_shares = num_batch_shares(microbatch_size, num_devices, tensor_parallel=summed_bytes is not None)
    num_workers = num_shares if summed_bytes is None else num_devices
    part_s = (num_devices - 1) / num_devices / rates.node_bytes_per_s
    forward_bytes, backward_bytes = parameter_bytes, 2 * parameter_bytes
    if summed_bytes:
        forward_bytes, backward_bytes = 4 * summed_bytes, (8 if is_recomputed else 4) * summed_bytes
    temporary_bytes = -(-alone.temporary_bytes // num_shares)
    if num_devices > 1:
        temporary_bytes = max(temporary_bytes + parameter_bytes, 2 * row_bytes + -(-row_bytes // num_devices))
    return LayerCost(
        num_devices=num_devices,
        forward_s=alone.forward_s / num_workers + forward_bytes * part_s,
        backward_s=alone.backward_s / num_workers + backward_bytes * part_s,
        residual_bytes=-(-alone.residual_bytes // num_shares),
        temporary_bytes=temporary_bytes,
    )


def adamw_state(num_parameters: int, precision: Precision = Precision.FLOAT32) -> StateBytes:
    """Return the bytes of parameters, float32 gradient sums and AdamW's two moments."""
    kept = 2 if precision is Precision.BFLOAT16 else 4
    return StateBytes(
        parameter_bytes=kept * num_parameters,
        gradient_bytes=4 * num_parameters,
        optimizer_bytes=2 * kept * num_parameters,
        rounded_bytes=2 * num_parameters if precision is Precision.MIXED else 0,
    )
