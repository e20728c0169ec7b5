"""Who is to blame when a run stumbles: the first cause, not the loudest one.

When a node dies, the others lose their peer within milliseconds and say so too, at times earlier than the agent that
saw the death. So each piece of evidence has a weight, and the heaviest of those that came in within a moment is taken,
the earliest among equals.
"""

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.planning.plan import NodeId


# Signals that others send: of these the log of a worker says nothing.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


class Weight(IntEnum):
    """How well a piece of evidence explains the failure of a run; the heavier wins."""

    COLLATERAL = 0  # a worker lost, or waits for, another one
    OWN = 1  # a worker failed by itself, as far as it knows: its error may still be a consequence
    FIRM = 2  # a process was killed, stopped, or does not answer: no other node does that to it


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One piece of evidence."""

    node: NodeId | None  # None: no single node
    blames: NodeId | None = None  # the node that `node` says it lost or waited for
    weight: Weight
    what: str  # a sentence without its full stop; names the node
    detail: str = ""  # log tail or traceback
    noticed_s: float
    is_agent: bool = False  # the agent is lost, too: no new worker can be had of it
    notice_s: float | None = None  # how long it had been so when it was noticed, where that is known
    is_error: bool = False  # the worker's own: its log says more

    @property
    def guilty(self) -> NodeId | None:
        """The node to blame: who only lost another one blames that one, if it knows which."""
        return self.blames if self.weight is Weight.COLLATERAL else self.node

    def record(self, *, generation: int, step: int, is_collateral: bool) -> events.Failed:
        """Return the record of this failure, in the step in progress."""
        return events.Failed(
            generation=generation,
            step=step,
            node=self.guilty,
            cause=self.what,
            detail=self.detail,
            is_collateral=is_collateral,
            is_error=self.is_error,
        )


class Evidence:
    """The evidence that awaits a verdict."""

    def __init__(self) -> None:
        self._causes: list[Cause] = []

    @property
    def since_s(self) -> float | None:
        """When the first piece came in; None: there is none."""
        return self._causes[0].noticed_s if self._causes else None

    def add(self, cause: Cause) -> None:
        self._causes.append(cause)

    def has_said_why(self, node: NodeId) -> bool:
        """Whether the worker of a node has said itself what is wrong with it."""
        return any(cause.node == node and cause.weight is Weight.OWN for cause in self._causes)

    def take(self) -> tuple[Cause, ...]:
        """Return all evidence, and forget it: first the first cause (the heaviest; the earliest of equals)."""
        causes, self._causes = self._causes, []
        if not causes:
            return ()
        first = max(causes, key=lambda cause: cause.weight)  # max takes the first of equals
        return first, *(cause for cause in causes if cause is not first)


def cause_of_exit(exited: messages.WorkerExited, now_s: float) -> Cause:
    """Explain the end of a worker."""
    if not exited.is_started:
        what = f"the worker of node {exited.node} could not be started: {exited.log_tail}"
        return Cause(node=exited.node, weight=Weight.OWN, what=what, noticed_s=now_s)
    what = f"the worker of node {exited.node} {describe_exit(exited.exit_code)}"
    # Libraries abort when a peer goes away; any other signal came from outside or from a fault of the worker's own.
    is_firm = exited.exit_code < 0 and exited.exit_code != -signal.SIGABRT
    weight = Weight.FIRM if is_firm else Weight.OWN
    is_error = -exited.exit_code not in _FROM_OUTSIDE
    return Cause(node=exited.node, weight=weight, what=what, detail=exited.log_tail, noticed_s=now_s, is_error=is_error)


def cause_of_failure(failed: messages.Failed, now_s: float) -> Cause:
    """Explain what a worker says of its own end."""
    weight = Weight.COLLATERAL if failed.is_collateral else Weight.OWN
    lost = "failed" if failed.blames is None else f"lost node {failed.blames}"
    what = f"the worker of node {failed.node} {lost}: {failed.error}"
    return Cause(
        node=failed.node,
        blames=failed.blames,
        weight=weight,
        what=what,
        detail=failed.traceback,
        noticed_s=now_s,
        is_error=weight is Weight.OWN,
    )


def describe_exit(exit_code: int) -> str:
    """Say in words how a process ended."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (kill -9, or out of memory)" if exit_code == -signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def suspects(
    late: Collection[NodeId], *, waits: Mapping[NodeId, Collection[NodeId]], stopped: Collection[NodeId] = ()
) -> tuple[NodeId, ...]:
    """Return the nodes that may hold up a step, ascending: one where it is clear.

    Args:
        late: the nodes that have not done their part.
        waits: for nodes that say so, the nodes they wait for.
        stopped: nodes whose worker is stopped by a signal.
    """
    if found := [node for node in late if node in stopped]:
        return tuple(sorted(found))
    # Others wait for it, and it waits for nobody: it is busy with something that does not end.
    awaited = {node for nodes in waits.values() for node in nodes}
    if found := [node for node in late if node in awaited and node not in waits]:
        return tuple(sorted(found))
    silent = [node for node in late if node not in waits]
    return tuple(sorted(silent or late))
