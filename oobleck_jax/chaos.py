"""Random failures of a real run, and a check of everything that must hold nevertheless.

What is struck, and when, is a pure function of the seed (`draw_strikes`): the next strike comes when the run has
recovered from the one before, a drawn number of steps and a drawn part of a second later. All strikes are signals from
outside; nothing in the run knows of them.
"""

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from oobleck_jax import events
from oobleck_jax.errors import ConfigError
from oobleck_jax.journal import read_journal
from oobleck_jax.live_run import LiveRun, LiveRunError
from oobleck_jax.run_processes import agents_of, workers_of


class Target(StrEnum):
    """What is struck."""

    WORKER = "worker"  # kill -9
    AGENT = "agent"  # kill -9; its worker dies with it, and another agent joins
    TWO = "two"  # kill -9 of two workers at once
    AGAIN = "again"  # kill -9 of a worker, and of another one while the others recover
    STOP = "stop"  # SIGSTOP of a worker
    LEAVE = "leave"  # SIGTERM of an agent, and another one joins
    COORDINATOR = "coordinator"  # kill -9, and the same command again


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """One failure."""

    target: Target
    node: int  # the first struck; of no meaning for the coordinator
    other: int  # the second struck: two, again
    steps: int  # committed since the run had recovered
    delay_s: float  # and so long after that
    pause_s: float  # between the first and the second: again


def draw_strikes(seed: int, *, count: int, num_nodes: int, fault_tolerance: int) -> tuple[Strike, ...]:
    """Return the strikes of a seed. Pure.

    Args:
        count: how many.
        num_nodes: of the run.
        fault_tolerance: of the run; two nodes at once are struck only if it is 2 or more.
    """
    draw = random.Random(seed)
    targets = [target for target in Target if fault_tolerance > 1 or target not in (Target.TWO, Target.AGAIN)]
    strikes: list[Strike] = []
    for number in range(count):
        # Every kind comes before any comes again.
        target = targets[number % len(targets)] if number < len(targets) else draw.choice(targets)
        node, other = draw.sample(range(num_nodes), 2)
        strikes.append(
            Strike(
                target=target,
                node=node,
                other=other,
                steps=draw.randint(1, 4),
                delay_s=draw.uniform(0.0, 0.4),
                pause_s=draw.uniform(0.0, 0.4),
            )
        )
    return tuple(strikes)


class Chaos:
    """A run of scripts/train.py under strikes.

    Attributes:
        struck: strikes carried out.
        survived: of these, those after which the run went on as before.
    """

    def __init__(
        self,
        command: Sequence[str],
        run_dir: Path,
        *,
        join_command: Sequence[str],
        num_nodes: int,
        limit_s: float = 90.0,
    ) -> None:
        """Prepare.

        Args:
            command: that starts the run; given again, it resumes it.
            run_dir: of the run.
            join_command: that starts a node, but for `--join`.
            num_nodes: of the run; there are never more.
            limit_s: what the run may take to recover, or to end.
        """
        self.struck = self.survived = 0
        self._join_command = list(join_command)
        self._num_nodes, self._limit_s = num_nodes, limit_s
        self._run = LiveRun(run_dir, command)
        self._joiners: list[subprocess.Popen[bytes]] = []

    def run(self, strikes: Sequence[Strike], tell: Callable[[str], None]) -> None:
        """Start the run, strike, and wait for its end.

        Raises:
            LiveRunError: it does not go on, or does not end well; the rest of the strikes is left out.
        """
        self._run.start()
        try:
            self._await_all(min_steps=1, limit_s=3 * self._limit_s)  # everything is compiled first
            for number, strike in enumerate(strikes):
                self._await_steps(self._run.num_steps + strike.steps)
                time.sleep(strike.delay_s)
                tell(f"{number + 1}/{len(strikes)} at step {self._run.num_steps}: {json.dumps(asdict(strike))}")
                self.struck += 1
                self._carry_out(strike)
                self._await_all(min_steps=self._run.num_steps + 1)
                self.survived += 1
            self._run.interrupt(limit_s=self._limit_s)
            for joiner in self._joiners:
                joiner.wait(timeout=self._limit_s)
        except BaseException:
            for joiner in self._joiners:
                joiner.kill()
                joiner.wait()
            self._run.kill_all()
            raise

    def _carry_out(self, strike: Strike) -> None:
        workers, agents = self._run.workers, self._run.agents
        match strike.target:
            case Target.WORKER:
                os.kill(workers[strike.node], signal.SIGKILL)
            case Target.STOP:
                os.kill(workers[strike.node], signal.SIGSTOP)
            case Target.TWO | Target.AGAIN:
                os.kill(workers[strike.node], signal.SIGKILL)
                time.sleep(strike.pause_s if strike.target is Target.AGAIN else 0.0)
                os.kill(workers[strike.other], signal.SIGKILL)
            case Target.AGENT | Target.LEAVE:
                os.kill(agents[strike.node], signal.SIGKILL if strike.target is Target.AGENT else signal.SIGTERM)
                gone = agents[strike.node]
                self._await(lambda: gone not in self._run.agents.values(), "end of the agent")
                self._join(strike.node)
            case Target.COORDINATOR:
                self._run.kill()
                self._run.start()

    def _join(self, node: int) -> None:
        """Let a new agent come, as an operator or a cluster manager would."""
        with (self._run.run_dir / "logs" / f"node-{node}.log").open("ab") as log:
            command = [*self._join_command, "--join", str(self._run.run_dir)]
            self._joiners.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))

    def _await_steps(self, count: int) -> None:
        self._await(lambda: self._run.num_steps >= count, f"step {count - 1}")

    def _await_all(self, *, min_steps: int, limit_s: float | None = None) -> None:
        """Wait until all nodes work, and some steps are committed."""
        self._await(
            lambda: self._run.num_steps >= min_steps and self._num_working() == self._num_nodes,
            f"step {min_steps - 1} with all {self._num_nodes} nodes",
            limit_s,
        )

    def _await(self, condition: Callable[[], bool], what: str, limit_s: float | None = None) -> None:
        try:
            self._run.wait(what, condition, limit_s=limit_s or self._limit_s)
        except LiveRunError as error:
            raise LiveRunError(
                f"{error} ({self._num_working()} of {self._num_nodes} nodes work, {self._run.num_steps} steps are "
                "committed)"
            ) from None

    def _num_working(self) -> int:
        """Return how many nodes work in the generation that runs; 0 between generations."""
        is_prepared = False
        for _, record in reversed(self._run.events):
            match record:
                case events.Prepared():
                    is_prepared = True
                case events.Planned():
                    return len(record.plan.nodes) if is_prepared else 0
                case events.Abandoned() | events.Gathering() | events.Resumed():
                    return 0
                case _:
                    pass
        return 0


def violations_of(run_dir: Path, expected_losses: Sequence[float], *, relative: float) -> list[str]:
    """Return what the files of a run say against the properties M1, M2, M3, T2, T3 and T4.

    Args:
        run_dir: of the run.
        expected_losses: of each step, of a run to which nothing happened.
        relative: how much a loss may differ.
    """
    wrong: list[str] = []
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    metrics = list({line["step"]: line for line in lines}.values())  # of a step that was done again, the last
    try:
        journal = read_journal(run_dir / "journal.jsonl")
    except ConfigError as error:
        wrong.append(f"M2: the committed steps are not one after the other: {error}")
    else:
        if [line["step"] for line in lines] != [record.step for _, record in journal.decided]:
            wrong.append("M2: metrics.jsonl and journal.jsonl have other steps")
    samples = [(line["sample_first"], line["sample_end"]) for line in metrics]
    if any(after[0] != before[1] for before, after in pairwise(samples)):
        wrong.append("T4: the samples of the steps are not one after the other")
    for line in metrics[: len(expected_losses)]:
        expected = expected_losses[line["step"]]
        if not abs(line["loss"] - expected) <= relative * abs(expected):
            wrong.append(f"T2: step {line['step']} has loss {line['loss']!r}, undisturbed {expected!r}")
    planned = [record for _, record in events.read_events(run_dir / "events.jsonl")]
    generations = [record.generation for record in planned if isinstance(record, events.Planned)]
    if any(after <= before for before, after in pairwise(generations)):
        wrong.append(f"M1: generations do not grow: {generations}")
    wrong += [
        f"M3: generation {record.generation} has no reason"
        for record in planned
        if isinstance(record, events.Planned) and not record.reason
    ]
    seen: dict[str, set[str]] = {}
    for log in (run_dir / "logs").glob("node-*.log"):
        for state, checksum in re.findall(
            r"state of (\S+ after step \d+): ([0-9a-f]{16})", log.read_text(errors="replace")
        ):
            seen.setdefault(state, set()).add(checksum)
    wrong += [f"T3: holders differ in {state}" for state, checksums in seen.items() if len(checksums) > 1]
    if not seen:
        wrong.append("T3: no node wrote checksums of its state")
    if left := sorted([*workers_of(run_dir).values(), *agents_of(run_dir).values()]):
        wrong.append(f"processes are left: {left}")
    return wrong
