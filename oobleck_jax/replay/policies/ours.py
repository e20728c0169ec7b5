"""This project: pipeline templates, best plan after every change, states from the memory of the others.

What happens is what `elastic/course.py` does, decided by the planner that it asks, with measured costs:

- A loss abandons the step in progress. Once it is detected, the nodes that are left get the best plan, copy what they
  miss, and do the step again. A loss meanwhile begins this anew.
- Nodes that are told to leave go after the step in progress, and nothing is lost.
- Who joins gets ready while the others train, and takes part from a step boundary on.
- If nobody has some layer any more, everybody goes back to the last checkpoint that was durable; with too few nodes
  for a pipeline, they wait for more.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from math import ceil

from oobleck_jax.errors import NotEnoughNodes
from oobleck_jax.planning.plan import NodeId, Plan
from oobleck_jax.planning.planner import plan_from
from oobleck_jax.planning.reconfigure import reconfigure, states_of
from oobleck_jax.replay.layouts import Layouts
from oobleck_jax.replay.recovery_costs import CheckpointCosts, RecoveryCosts
from oobleck_jax.replay.simulator import Action, Course, Lose, Outcome, Spend, Train
from oobleck_jax.replay.timeline import Spending


CHECKPOINT_EVERY_S = 1800.0
MANY = 1 << 60  # steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint."""

    since_s: float  # later work is not in it
    durable_s: float  # from then on it can be restored


@dataclass(kw_only=True, slots=True)
class _Run:
    """What changes."""

    members: set[NodeId]  # that take part, or may do so in the next generation
    known: set[NodeId] = field(default_factory=set[NodeId])  # members that have taken part
    starting: dict[NodeId, float] = field(default_factory=dict[NodeId, float])  # and when they are ready
    leaving: set[NodeId] = field(default_factory=set[NodeId])  # have been told so
    holdings: dict[NodeId, tuple[int, ...]] = field(default_factory=dict[NodeId, tuple[int, ...]])
    step_s: float = 0.0
    now_s: float = 0.0
    saved: list[Saved] = field(default_factory=lambda: [Saved(since_s=0.0, durable_s=0.0)])

    def take(self, outcome: Outcome, ready_s: float) -> None:
        """Note who came and who went."""
        self.now_s = outcome.now_s
        while outcome.left and self.saved[-1].durable_s > outcome.now_s:
            self.saved.pop()  # a part of it may have been the lost node's to write
        for node in outcome.left:
            self.members.discard(node)
            self.known.discard(node)
            self.starting.pop(node, None)
            self.holdings.pop(node, None)
        self.starting |= {node: joined_s + ready_s for node, joined_s in outcome.joined.items()}
        self.leaving = (self.leaving | set(outcome.leaving)) - set(outcome.left)

    def admit(self) -> bool:
        """Let those in that are ready, and those go that have been told; tell whether there are any."""
        ready = {node for node, ready_s in self.starting.items() if ready_s <= self.now_s}
        for node in (*ready, *self.leaving):
            self.starting.pop(node, None)
        going = self.members & self.leaving
        self.members = (self.members | ready) - self.leaving
        return bool(going or ready - self.leaving)

    def follow(self, plan: Plan, step_s: float) -> None:
        """Work by a plan from now on; what a node held besides is out of date after the next step."""
        self.holdings = _holdings_of(plan)
        self.known = set(self.members)
        self.step_s = step_s

    def steps_until_ready(self, step_s: float) -> int:
        """Return after how many steps the next node is ready; many, if none is starting."""
        ready_s = min(self.starting.values(), default=float("inf"))
        return ceil((ready_s - self.now_s) / step_s) if ready_s < float("inf") else MANY


@dataclass(frozen=True, kw_only=True, slots=True)
class Ours:
    """See the top of this file."""

    layouts: Layouts
    costs: RecoveryCosts
    checkpoints: CheckpointCosts
    fault_tolerance: int
    checkpoint_every_s: float = CHECKPOINT_EVERY_S
    source: str = "this project's planner; costs measured by scripts/bench_recovery.py and bench_checkpoint.py"

    @property
    def variant(self) -> str:
        return f"f = {self.fault_tolerance}"

    def run(self, nodes: tuple[NodeId, ...]) -> Course:
        run = _Run(members=set(nodes))
        yield from self._begin(run)
        num_since_save = 0
        while True:
            every = max(round(self.checkpoint_every_s / run.step_s), 1)
            cost = self.checkpoints.steps_per_save / every
            step_s = run.step_s * (1 + cost)
            outcome = yield Train(
                step_s=step_s,
                samples=self.layouts.samples_per_step,
                max_steps=max(min(every - num_since_save, run.steps_until_ready(step_s)), 1),
                extra=Spending.CHECKPOINT,
                extra_fraction=cost / (1 + cost),
                heeds_notice=True,
                on=run.members,
            )
            run.take(outcome, self.costs.join_ready_s)
            num_since_save += outcome.num_steps
            if outcome.is_interrupted:
                yield Lose(since_s=outcome.step_begin_s)
                yield from self._recover(run, must_detect=True)
                continue
            if num_since_save >= every:
                num_since_save = 0
                run.saved.append(Saved(since_s=outcome.now_s, durable_s=outcome.now_s + self._durable_s(run)))
            if run.admit():
                yield from self._recover(run, must_detect=False)

    def _begin(self, run: _Run) -> Generator[Action, Outcome, None]:
        """Start once there are enough nodes; that is free, as it is for every policy."""
        while True:
            nodes = tuple(sorted(run.members))
            try:
                planning = plan_from(self.layouts.templates, nodes=nodes, fault_tolerance=self.fault_tolerance)
            except NotEnoughNodes:
                run.take((yield Spend(spending=Spending.IDLE, awaits_joins=True)), 0.0)
                run.admit()
                continue
            run.follow(planning.plan, planning.step_s)
            return

    def _recover(self, run: _Run, *, must_detect: bool) -> Generator[Action, Outcome, None]:
        """Go from one generation to the next, through all losses on the way."""
        while True:
            if must_detect:
                outcome = yield Spend(spending=Spending.RECOVERY, seconds=self.costs.detect_s, on=run.members)
                run.take(outcome, self.costs.join_ready_s)
                if outcome.is_interrupted:
                    continue
            run.admit()
            restore_s = 0.0
            must_restore = run.members and not self._is_covered(run)
            if must_restore:
                yield Lose(since_s=run.saved[-1].since_s)
                run.holdings.clear()
            try:
                found = reconfigure(
                    self.layouts.templates,
                    nodes=tuple(sorted(run.members)),
                    holdings=run.holdings,
                    fault_tolerance=self.fault_tolerance,
                )
            except NotEnoughNodes:
                yield from self._wait(run)
                must_detect = False
                continue
            plan = found.planning.plan
            if must_restore:
                restore_s = self._most_bytes(plan) / self.checkpoints.read_bytes_per_s
            regroup_s = self.costs.regroup_s(
                len(run.members),
                found.copies,
                found.copy_s,
                with_new_nodes=any(node not in run.known for node in run.members),
            )
            outcome = yield Spend(spending=Spending.RECOVERY, seconds=regroup_s + restore_s, on=run.members)
            run.take(outcome, self.costs.join_ready_s)
            if not outcome.is_interrupted:
                run.follow(plan, found.planning.step_s)
                return
            must_detect = True

    def _wait(self, run: _Run) -> Generator[Action, Outcome, None]:
        """Wait until a node is ready, or is lost."""
        seconds = min(run.starting.values(), default=float("inf")) - run.now_s
        outcome = yield Spend(spending=Spending.IDLE, seconds=max(seconds, 0.0), awaits_joins=not run.starting)
        run.take(outcome, self.costs.join_ready_s)

    def _is_covered(self, run: _Run) -> bool:
        # Nodes that are about to leave stay until nobody needs their states.
        held = {layer for node in run.members | run.leaving for layer in run.holdings.get(node, ())}
        return len(held) == self.layouts.workload.profile.num_layers

    def _durable_s(self, run: _Run) -> float:
        """Return how long a checkpoint takes to be durable; the nodes that work share it."""
        return self.layouts.workload.state_bytes / len(run.holdings) / self.checkpoints.write_bytes_per_s

    def _most_bytes(self, plan: Plan) -> int:
        """Return the bytes of the node that restores most."""
        states = states_of(self.layouts.workload.profile)
        return max(
            sum(state.num_bytes for state in states if not layers.isdisjoint(state.layers))
            for layers in map(frozenset, _holdings_of(plan).values())
        )


def _holdings_of(plan: Plan) -> dict[NodeId, tuple[int, ...]]:
    spare = set(plan.spare_nodes)
    return {node: plan.layers_of(node) for node in plan.nodes if node not in spare}
