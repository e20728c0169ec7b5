"""What the devices of a lane need at the peak: the stages that are on them, and the microbatches in flight of each."""

from oobleck_jax.config import ScheduleKind
from oobleck_jax.planning.costs import Costs
from oobleck_jax.planning.plan import Template
from oobleck_jax.planning.schedule import Action, Phase
from oobleck_jax.planning.schedule_kinds import in_flight_limits, schedule_with


_ROUNDS = 3  # after which all has happened that ever does


def lanes_memory_bytes(
    template: Template, num_microbatches: int, costs: Costs, schedule: ScheduleKind
) -> tuple[int, ...]:
    """Return the peak memory of each device of every lane.

    Several stages on the same devices each have their state, and their activations on the way; of their programs one
    runs at a time. How many microbatches each keeps, and when, is read from the schedule itself, which repeats itself
    after less than two rounds of the lanes.
    """
    stages, num_lanes = template.stages, template.num_lanes
    devices = [costs.device_counts.index(stage.num_devices) for stage in stages]
    num_stages = len(stages)
    if num_lanes == num_stages:
        limits = in_flight_limits(
            schedule, num_lanes=num_lanes, num_stages=num_stages, num_microbatches=num_microbatches
        )
        return tuple(
            costs.memory_bytes(devices[index], stage.first_layer, stage.end_layer, limits[index])
            for index, stage in enumerate(stages)
        )
    rows = schedule_with(template, schedule, min(num_microbatches, _ROUNDS * num_lanes))
    peaks: list[int] = []
    for lane, row in enumerate(rows):
        runs = {
            index: (devices[index], stages[index].first_layer, stages[index].end_layer)
            for index in range(lane, num_stages, num_lanes)
        }
        fixed = sum(costs.memory_bytes(*run, 0) - int(costs.temporary_bytes[run]) for run in runs.values())
        passing = {index: int(costs.passing_bytes[run]) for index, run in runs.items()}
        working = max(int(costs.temporary_bytes[run]) - passing[index] for index, run in runs.items())
        kept = {index: int(costs.residual_bytes[run]) for index, run in runs.items()}
        peaks.append(fixed + sum(passing.values()) + working + _most_kept(row, kept))
    return tuple(peaks)


def _most_kept(row: tuple[Action, ...], kept_bytes: dict[int, int]) -> int:
    """Return the most bytes that a lane keeps between forward and backward."""
    kept = most = 0
    for action in row:
        kept += kept_bytes[action.stage] * (1 if action.phase is Phase.FORWARD else -1)
        most = max(most, kept)
    return most
