"""What each change of membership costs, from the first notice to the first commit after it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from oobleck_jax import events
from oobleck_jax.elastic.blame import Cause, Weight
from oobleck_jax.elastic.limits import Limits
from oobleck_jax.elastic.messages import Prepared, Vote
from oobleck_jax.planning.plan import NodeId


_PHASES = ("compile", "copy", "fabric")  # of a preparation, whose times are told


@dataclass(kw_only=True, slots=True)
class _Open:
    """A change that no commit has followed yet."""

    kind: str
    cause: str
    began_s: float
    notice_s: float | None
    nodes: list[NodeId] = field(default_factory=list[NodeId])
    collateral: list[NodeId] = field(default_factory=list[NodeId])
    num_generations: int = 0
    plan_s: float = 0.0
    received_bytes: int = 0
    num_redone: int = 0
    num_redone_steps: int = 0
    num_compilations: int = 0
    slowest: dict[str, float] = field(default_factory=dict[str, float])  # of the last generation, in each phase


class Incidents:
    """The changes that are going on; each becomes one record.

    Losses that follow one another before a step is committed are one incident. A loss while nodes join or leave is
    one of its own, besides theirs.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}  # by kind

    def open(
        self, kind: str, cause: str, nodes: Iterable[NodeId], now_s: float, *, notice_s: float | None = None
    ) -> None:
        """A change begins, or one of its kind that is going on grows; `notice_s` ago, if that is known."""
        new = _Open(kind=kind, cause=cause, began_s=now_s, notice_s=notice_s)
        incident = self._open.setdefault(kind, new)
        incident.nodes += [node for node in nodes if node not in incident.nodes]

    def is_consequence(self, cause: Cause, limits: Limits) -> bool:
        """Whether a cause is likely the consequence of a loss a moment ago, which others noticed by failing."""
        loss = self._open.get("loss")
        return loss is not None and cause.weight < Weight.FIRM and cause.noticed_s - loss.began_s <= limits.verdict_s

    def add_collateral(self, node: NodeId) -> None:
        """A node was lost as a consequence of the loss that is going on."""
        loss = self._open["loss"]
        if node not in (*loss.nodes, *loss.collateral):
            loss.collateral.append(node)

    def redo(self, num_microbatches: int) -> None:
        """A step was abandoned while these microbatches were in progress."""
        for incident in self._open.values():
            incident.num_redone += num_microbatches

    def go_back(self, num_steps: int) -> None:
        """So many committed steps are done again, from a checkpoint on."""
        for incident in self._open.values():
            incident.num_redone_steps += num_steps

    def begin(self, plan_s: float) -> None:
        """A generation begins."""
        for incident in self._open.values():
            incident.num_generations += 1
            incident.plan_s += plan_s
            incident.slowest.clear()

    def prepare(self, prepared: Prepared) -> None:
        """A node has prepared."""
        for incident in self._open.values():
            incident.received_bytes += prepared.received_bytes
            incident.num_compilations += prepared.num_new_compilations
            for phase in (*_PHASES, *({"restore"} & prepared.seconds.keys())):
                incident.slowest[phase] = max(prepared.seconds.get(phase, 0.0), incident.slowest.get(phase, 0.0))

    def redone(self, vote: Vote) -> None:
        """A node has done the step again, or the first one after the change."""
        for incident in self._open.values():
            incident.num_compilations += vote.num_new_compilations

    def close(self, generation: int, step: int, now_s: float, *, first_step_s: float) -> tuple[events.Incident, ...]:
        """A step was committed, or the run is done: return the records of all changes before it."""
        records = tuple(
            events.Incident(
                kind=incident.kind,
                cause=incident.cause,
                nodes=tuple(sorted(incident.nodes)),
                collateral=tuple(sorted(incident.collateral)),
                generation=generation,
                num_generations=incident.num_generations,
                step=step,
                seconds=_seconds(incident, now_s, first_step_s),
                received_bytes=incident.received_bytes,
                num_redone_microbatches=incident.num_redone,
                num_compilations=incident.num_compilations,
                num_redone_steps=incident.num_redone_steps,
            )
            for incident in self._open.values()
        )
        self._open.clear()
        return records


def _seconds(incident: _Open, now_s: float, first_step_s: float) -> dict[str, float]:
    notice = {} if incident.notice_s is None else {"notice": incident.notice_s}
    recovery = {"plan": incident.plan_s, **incident.slowest} if incident.num_generations else {}
    return {**notice, **recovery, "first_step": first_step_s, "total": now_s - incident.began_s}
