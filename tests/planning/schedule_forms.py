"""Schedules of every kind, for tests of what must hold for all of them."""

from dataclasses import dataclass

from hypothesis import strategies as st

from oobleck_jax.config import ScheduleKind
from oobleck_jax.planning.schedule import Schedule
from oobleck_jax.planning.schedule_kinds import in_flight_limits, make_schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What a schedule depends on."""

    kind: ScheduleKind
    num_lanes: int
    num_stages: int
    num_microbatches: int

    @property
    def schedule(self) -> Schedule:
        return make_schedule(
            self.kind, num_lanes=self.num_lanes, num_stages=self.num_stages, num_microbatches=self.num_microbatches
        )

    @property
    def limits(self) -> tuple[int, ...]:
        return in_flight_limits(
            self.kind, num_lanes=self.num_lanes, num_stages=self.num_stages, num_microbatches=self.num_microbatches
        )


def _form(kind: ScheduleKind, num_lanes: int, num_chunks: int, num_microbatches: int) -> Form:
    num_stages = num_lanes * (num_chunks if kind is ScheduleKind.INTERLEAVED else 1)
    return Form(kind=kind, num_lanes=num_lanes, num_stages=num_stages, num_microbatches=num_microbatches)


KINDS = tuple(kind for kind in ScheduleKind if kind is not ScheduleKind.AUTO)
forms = st.builds(_form, st.sampled_from(KINDS), st.integers(1, 7), st.integers(2, 4), st.integers(1, 20))
