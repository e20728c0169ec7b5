"""Failures on purpose, for demonstrations and tests: `--inject kill:2@10:backward,join@20`.

    kill:NODE@STEP[:MOMENT]    the worker of the node kills itself (SIGKILL) in that step
    raise:NODE@STEP[:MOMENT]   ... fails with an error, as one with a bug would
    stop:NODE@STEP[:MOMENT]    ... stops itself (SIGSTOP), and so hangs
    term:NODE@STEP[:MOMENT]    its agent is asked to leave (SIGTERM), as spot markets and Slurm do
    slow:NODE@STEP[:SECONDS]   every step of the node takes longer from then on (default 1 s)
    join@STEP                  one more node joins after the step (only where all nodes are on this machine)
    coordinator@STEP           the coordinator kills itself once the step is committed and nobody knows yet

Moments are `forward` (the default), `backward`, `sum`, `vote`, `commit`, and `recovery`: while the node prepares to do
that step in a new generation. The signals are real; nothing else in the program knows that they are on purpose.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from oobleck_jax.errors import ConfigError
from oobleck_jax.planning.plan import NodeId


class Kind(StrEnum):
    """What goes wrong."""

    KILL = "kill"
    RAISE = "raise"
    STOP = "stop"
    TERM = "term"
    SLOW = "slow"
    JOIN = "join"
    COORDINATOR = "coordinator"


class Moment(StrEnum):
    """Where in a step a worker is."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SUM = "sum"  # of gradients, before it begins
    VOTE = "vote"  # sent, not decided
    COMMIT = "commit"  # known, not carried out
    RECOVERY = "recovery"  # preparing a generation other than the first


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """One failure on purpose."""

    kind: Kind
    step: int
    node: NodeId | None = None  # None: join and coordinator
    moment: Moment = Moment.FORWARD
    seconds: float = 1.0  # slow: longer for each step

    def __str__(self) -> str:
        if self.node is None:
            return f"{self.kind}@{self.step}"
        detail = f"{self.seconds:g}" if self.kind is Kind.SLOW else str(self.moment)
        return f"{self.kind}:{self.node}@{self.step}:{detail}"


AtMoment = Callable[[Moment, int], None]
"""Told where in which step a worker is."""


_FATAL = (Kind.KILL, Kind.RAISE, Kind.STOP)  # for a worker
_OF_NODE = re.compile(r"(kill|raise|stop|term|slow):(\d+)@(\d+)(?::([a-z]+|\d+(?:\.\d+)?))?")
_OF_RUN = re.compile(r"(join|coordinator)@(\d+)")


def parse_injections(text: str) -> tuple[Injection, ...]:
    """Parse what is given to `--inject`: items with commas between them.

    Raises:
        ConfigError: an item that is none of the forms at the top of this file.
    """
    return tuple(_parse(item.strip()) for item in text.split(",") if item.strip())


def _parse(item: str) -> Injection:
    if match := _OF_RUN.fullmatch(item):
        return Injection(kind=Kind(match[1]), step=int(match[2]))
    if not (match := _OF_NODE.fullmatch(item)):
        raise ConfigError(
            f"--inject {item}: give kill:NODE@STEP[:MOMENT], raise:..., stop:..., term:..., slow:NODE@STEP[:SECONDS], "
            "join@STEP or coordinator@STEP"
        )
    kind, node, step, detail = Kind(match[1]), NodeId(int(match[2])), int(match[3]), match[4]
    if kind is Kind.SLOW:
        if detail is not None and not detail[0].isdecimal():
            raise ConfigError(f"--inject {item}: {detail} is no number of seconds")
        return Injection(kind=kind, node=node, step=step, seconds=float(detail or 1.0))
    if detail is not None and detail not in list(Moment):
        raise ConfigError(f"--inject {item}: {detail} is no moment; choose from {', '.join(Moment)}")
    return Injection(kind=kind, node=node, step=step, moment=Moment(detail or Moment.FORWARD))


def check_injections(injections: Sequence[Injection], *, num_nodes: int, steps: int, is_local: bool) -> None:
    """Refuse what can never happen.

    Args:
        num_nodes: the most nodes there can be.
        steps: of the run.
        is_local: whether all nodes are on this machine.

    Raises:
        ConfigError: a node or a step that does not exist, or a join on a machine that has not all nodes.
    """
    for injection in injections:
        if not 0 <= injection.step < steps:
            raise ConfigError(f"--inject {injection}: the run has steps 0 to {steps - 1}")
        if injection.node is not None and injection.node >= num_nodes:
            raise ConfigError(f"--inject {injection}: the run has nodes 0 to {num_nodes - 1}")
        if injection.kind is Kind.JOIN and not is_local:
            raise ConfigError(f"--inject {injection} needs all nodes on this machine; start one with --join instead")


class WorkerInjector:
    """Carries out what a worker is to suffer."""

    def __init__(self, texts: Iterable[str], *, incarnation: int = 0) -> None:
        """Take the injections of one node.

        Args:
            texts: as of `str(Injection)`.
            incarnation: how many workers of this node have ended already, each by the next fatal injection in order.
        """
        self._injections = [injection for text in texts for injection in parse_injections(text)]
        fatal = [injection for injection in self._injections if injection.kind in _FATAL]
        for injection in sorted(fatal, key=lambda injection: injection.step)[:incarnation]:
            self._injections.remove(injection)

    def __call__(self, moment: Moment, step: int) -> None:
        """Do what is due at this moment of this step."""
        for injection in tuple(self._injections):
            if injection.kind is Kind.SLOW:
                if moment is Moment.SUM and step >= injection.step:
                    time.sleep(injection.seconds)
            elif (injection.moment, injection.step) == (moment, step):
                self._injections.remove(injection)
                _strike(injection)


def _strike(injection: Injection) -> None:
    match injection.kind:
        case Kind.RAISE:
            raise RuntimeError(f"an error on purpose (--inject {injection})")
        case Kind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Kind.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Kind.TERM:
            os.kill(os.getppid(), signal.SIGTERM)  # the agent is the parent
        case kind:
            raise AssertionError(f"{kind} is not for workers")
