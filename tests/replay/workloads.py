"""Workloads of equal layers with round numbers: every policy's steps can be computed in the head.

Four layers of 1 s forward and 2 s backward; links, sums and updates take no time. So a grid of P pipelines of S nodes
takes (12 / S) * (M / P + S - 1) seconds for a step of M microbatches.
"""

from dataclasses import replace

from oobleck_jax.planning.plan import NodeId
from oobleck_jax.planning.profile import Rate
from oobleck_jax.replay.layouts import Layouts
from oobleck_jax.replay.recovery_costs import CheckpointCosts, RecoveryCosts
from oobleck_jax.replay.trace import Life, Trace, make_trace
from oobleck_jax.replay.workload import Workload
from tests.planning.profiles import make_layer, make_profile


SECOND = 1_000_000  # units of make_layer
STATE_BYTES = 100  # parameters of a layer; copied with the moments: 300, in memory with the gradients: 400
COSTS = RecoveryCosts(
    detect_s=4.0,
    plan_s_per_node=0.1,
    fabric_s_per_node=0.2,
    rest_s=1.0,
    check_bytes_per_s=100.0,
    join_ready_s=10.0,
    join_compile_s=2.0,
)
FREE = CheckpointCosts(steps_per_save=0.0, write_bytes_per_s=1e30, read_bytes_per_s=1e30)


def workload(*, num_microbatches: int = 12, memory_bytes: int = 10_000, link: Rate | None = None) -> Workload:
    layer = make_layer([(SECOND, 2 * SECOND)], state_bytes=STATE_BYTES)
    profile = make_profile([layer] * 4, **({} if link is None else {"link": link}))
    return Workload(
        name="four layers",
        profile=replace(profile, microbatch_size=1),
        num_microbatches=num_microbatches,
        sequence_length=8,
        device_memory_bytes=memory_bytes,
    )


def layouts(max_nodes: int, **given: int) -> Layouts:
    return Layouts(workload(**given), max_nodes=max_nodes)


def trace_of(duration_s: float, *lives: tuple[float, float], notice_s: float = 0.0) -> Trace:
    """Return a trace of nodes 0, 1, ... with these beginnings and ends."""
    made = [Life(node=NodeId(node), begin_s=begin, end_s=end) for node, (begin, end) in enumerate(lives)]
    return replace(make_trace("test", duration_s, made), notice_s=notice_s)


STAYS = float("inf")
