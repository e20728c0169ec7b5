"""Waiting for another node: with a deadline, ending when the generation is over, and saying whom one waits for."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from oobleck_jax.errors import PeerLost, Stalled
from oobleck_jax.planning.plan import NodeId


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How a node waits for others within one generation.

    Attributes:
        abandoned: set when the generation, or the run, is over.
        limit_s: longest wait for one thing; then `Stalled` is raised.
        notice_s: after so long, and again after each such time, `on_waiting` is told of the node waited for.
    """

    abandoned: threading.Event
    limit_s: float
    on_waiting: Callable[[NodeId], None]
    notice_s: float = 1.0

    def wait(self, wait: Callable[[float, threading.Event], T], nodes: Sequence[NodeId]) -> T:
        """Return what `wait(limit_s, abandoned)` returns; `nodes` are those that it depends on, at least one.

        Raises:
            Abandoned: the generation ended meanwhile.
            Stalled: `limit_s` went by.
            PeerLost: the other side is gone.
        """
        only = nodes[0] if len(nodes) == 1 else None  # of several, nobody knows which one it was
        deadline_s = time.monotonic() + self.limit_s
        while True:
            remaining_s = deadline_s - time.monotonic()
            try:
                return wait(min(self.notice_s, max(remaining_s, 0.001)), self.abandoned)
            except PeerLost as lost:
                raise PeerLost(str(lost), what=lost.what, node=only) from lost
            except Stalled as stalled:
                if remaining_s <= self.notice_s:
                    raise Stalled(str(stalled), what=stalled.what, waited_s=self.limit_s, node=only) from stalled
                for node in nodes:
                    self.on_waiting(node)
