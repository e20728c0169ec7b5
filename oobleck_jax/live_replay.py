"""A trace for real: agents of a run are killed, and others join, when a trace says so, and the steps are counted.

Then the same trace is simulated, with the layers as they were measured on this machine and the usual time of a step
before the first failure, so that what is compared is what failures cost.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

from oobleck_jax import events
from oobleck_jax.errors import OobleckError
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.replay.layouts import Layouts
from oobleck_jax.replay.policies.ours import Ours
from oobleck_jax.replay.recovery_costs import CheckpointCosts, RecoveryCosts
from oobleck_jax.replay.simulator import simulate
from oobleck_jax.replay.trace import Life, Trace, make_trace
from oobleck_jax.replay.workload import Workload
from oobleck_jax.run_processes import agents_of


T = TypeVar("T")

NUM_USUAL = 20  # steps before the trace begins, which say what is usual; the first of them does not count
LIMIT_S = 300.0  # for the run to come up, or to end
NEVER_S = 1e12


class LiveError(OobleckError):
    """The run did not do what it must; the message says where its output is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveResult:
    """Steps that were committed during a trace, and those that a simulation of it has."""

    measured_steps: int
    simulated_steps: float
    usual_step_s: float  # measured before the trace
    forecast_step_s: float  # of the same plan, from the profile alone
    recoveries_s: tuple[float, ...]  # of each incident, from the notice to the first commit after it

    @property
    def error(self) -> float:
        """How far the simulation is off, as a part of what was measured."""
        return self.simulated_steps / self.measured_steps - 1


def short_trace(num_nodes: int, duration_s: float) -> Trace:
    """Return a trace with a loss, a node that comes instead, and another loss."""
    quarter_s = duration_s / 4
    lives = [Life(node=NodeId(node), begin_s=0.0, end_s=NEVER_S) for node in range(num_nodes - 1)]
    lives.append(Life(node=NodeId(num_nodes - 1), begin_s=0.0, end_s=quarter_s))
    lives.append(Life(node=NodeId(num_nodes), begin_s=2 * quarter_s, end_s=3 * quarter_s))
    return make_trace("live", duration_s, lives)


class LiveRun:
    """A run of scripts/train.py on this machine."""

    def __init__(self, flags: Sequence[str], *, train: Path, run_dir: Path, num_nodes: int, most_nodes: int) -> None:
        """Start it.

        Args:
            flags: of the run, besides those that follow.
            train: scripts/train.py.
            run_dir: its folder.
            num_nodes: at the beginning.
            most_nodes: at any time.
        """
        self._train, self._run_dir, self._num_nodes = train, run_dir, num_nodes
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self._output = run_dir.with_suffix(".out").open("wb")
        self._joiners: list[subprocess.Popen[bytes]] = []
        command = [*flags, "--nodes", str(num_nodes), "--max-nodes", str(most_nodes)]
        self._run = self._start([*command, "--steps", "1000000", "--eval-every", "0", "--run-dir", str(run_dir)])
        self._node_of = {NodeId(node): node for node in range(num_nodes)}  # ids of the trace, and of the run

    def usual_step_s(self) -> float:
        """Wait until all nodes work and have compiled ahead, and return the usual time of a step."""

        def usual() -> float | None:
            ahead = {record.node: when for when, record in self._told(events.CompiledAhead)}
            if len(ahead) < self._num_nodes:
                return None
            steps_s = [record.step_time_s for _, record in self._committed(max(ahead.values()))]
            return statistics.median(steps_s[1:]) if len(steps_s) >= NUM_USUAL else None

        return self._wait("usual steps of all nodes", usual)

    def play(self, trace: Trace, tell: Callable[[str], None]) -> int:
        """Kill and start nodes as the trace says, and return the number of steps committed meanwhile."""
        began_s = time.time()
        for change in trace.changes[1:]:
            self._sleep_until(began_s + change.time_s)
            for node in change.left:
                tell(f"{change.time_s:6.1f} s: kill -9 of node {self._node_of[node]}")
                os.kill(agents_of(self._run_dir)[self._node_of.pop(node)], signal.SIGKILL)
            for node in change.joined:
                self._node_of[node] = min(set(range(len(self._node_of) + 1)) - set(self._node_of.values()))
                tell(f"{change.time_s:6.1f} s: node {self._node_of[node]} joins")
                self._join(self._node_of[node])
        self._sleep_until(began_s + trace.duration_s)
        ended_s = began_s + trace.duration_s
        return sum(when <= ended_s for when, _ in self._committed(began_s))

    def recoveries_s(self) -> tuple[float, ...]:
        return tuple(record.seconds["total"] for _, record in self._told(events.Incident))

    def end(self) -> None:
        """End everything that was started here."""
        self._run.send_signal(signal.SIGINT)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                for process in [self._run, *self._joiners]:
                    process.wait(timeout=60)
        finally:
            for process in [self._run, *self._joiners]:
                process.kill()
                process.wait()
            for agent in agents_of(self._run_dir).values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(agent, signal.SIGKILL)
            self._output.close()

    def _start(self, flags: Sequence[str], output: BinaryIO | None = None) -> "subprocess.Popen[bytes]":
        command = [sys.executable, str(self._train), *flags]
        return subprocess.Popen(command, stdout=output or self._output, stderr=subprocess.STDOUT)

    def _join(self, node: int) -> None:
        """Start an agent, which prints into the log of its node, as all do: by that it is found."""
        with (self._run_dir / "logs" / f"node-{node}.log").open("ab") as log:
            self._joiners.append(self._start(["--join", str(self._run_dir)], log))

    def _told(self, kind: type[T]) -> list[tuple[float, T]]:
        path = self._run_dir / "events.jsonl"
        found = events.read_events(path) if path.exists() else ()
        return [(when, record) for when, record in found if isinstance(record, kind)]

    def _committed(self, since_s: float) -> list[tuple[float, events.Committed]]:
        path = self._run_dir / "journal.jsonl"
        found = events.read_events(path) if path.exists() else ()
        return [(when, one) for when, one in found if isinstance(one, events.Committed) and when > since_s]

    def _wait(self, what: str, condition: Callable[[], T | None]) -> T:
        deadline_s = time.monotonic() + LIMIT_S
        while (found := condition()) is None:
            self._check(what)
            if time.monotonic() > deadline_s:
                raise LiveError(f"no {what} within {LIMIT_S:.0f} s; see {self._output.name}")
            time.sleep(0.1)
        return found

    def _sleep_until(self, when_s: float) -> None:
        while (left_s := when_s - time.time()) > 0:
            self._check("the trace")
            time.sleep(min(left_s, 0.5))

    def _check(self, what: str) -> None:
        if self._run.poll() is not None:
            raise LiveError(f"the run ended ({self._run.returncode}) before {what}; see {self._output.name}")


def compare(
    trace: Trace,
    workload: Workload,
    *,
    fault_tolerance: int,
    costs: RecoveryCosts,
    usual_step_s: float,
    measured_steps: int,
    recoveries_s: tuple[float, ...],
) -> LiveResult:
    """Simulate a trace that was played.

    Args:
        trace: what was played.
        workload: with the costs of layers on this machine.
        fault_tolerance: f of the run.
        costs: of recoveries.
        usual_step_s: of a step before the trace; all computing is taken to be slower, or faster, to give this.
        measured_steps: committed during the trace.
        recoveries_s: that were measured; for the record.
    """
    num_nodes = len(trace.changes[0].joined)
    forecast_s = Layouts(workload, max_nodes=num_nodes).plan_step_s(num_nodes, fault_tolerance)
    assert forecast_s is not None, "the run had a plan for these nodes"
    layouts = Layouts(workload.slower(usual_step_s / forecast_s), max_nodes=trace.most_nodes)
    free = CheckpointCosts(steps_per_save=0.0, write_bytes_per_s=1e30, read_bytes_per_s=1e30)
    policy = Ours(layouts=layouts, costs=costs, checkpoints=free, fault_tolerance=fault_tolerance)
    replay = simulate(policy, replace(trace, notice_s=0.0))
    return LiveResult(
        measured_steps=measured_steps,
        simulated_steps=replay.samples / workload.samples_per_step,
        usual_step_s=usual_step_s,
        forecast_step_s=forecast_s,
        recoveries_s=recoveries_s,
    )
