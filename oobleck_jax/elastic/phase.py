"""What a run as a whole waits for; see membership.py."""

from collections.abc import Mapping
from enum import StrEnum


class Phase(StrEnum):
    """What the run as a whole waits for."""

    GATHERING = "gathering"
    MEETING = "meeting"
    PREPARING = "preparing"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


NEXT: Mapping[Phase, frozenset[Phase]] = {
    Phase.GATHERING: frozenset({Phase.MEETING, Phase.STOPPING}),
    Phase.MEETING: frozenset({Phase.PREPARING, Phase.MEETING, Phase.GATHERING, Phase.STOPPING}),
    Phase.PREPARING: frozenset({Phase.RUNNING, Phase.MEETING, Phase.GATHERING, Phase.STOPPING}),
    Phase.RUNNING: frozenset({Phase.MEETING, Phase.GATHERING, Phase.STOPPING}),
    Phase.STOPPING: frozenset({Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}
