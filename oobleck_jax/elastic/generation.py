"""One generation: a plan that is carried out. Its members, its barrier, the votes of the step in progress."""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.blame import suspects
from oobleck_jax.elastic.limits import Limits
from oobleck_jax.elastic.node import Node
from oobleck_jax.elastic.terms import Proposal
from oobleck_jax.elastic.votes import Decision, Fault, decide
from oobleck_jax.planning.plan import NodeId, Stage


_WAITING_S = 2.5  # a wait that has not been told of again for so long is over; it is repeated every second


@dataclass(kw_only=True, slots=True)
class _Evaluation:
    """An evaluation in progress."""

    step: int
    missing: set[NodeId]
    reports: dict[NodeId, messages.Evaluated] = field(default_factory=dict[NodeId, messages.Evaluated])


class Generation:
    """What the members of one generation have reported, and what that amounts to.

    Pure bookkeeping: it knows of no connection and takes the time as an argument.

    Attributes:
        number: of the generation.
        proposal: its plan, and why it has this one.
        plan: what it carries out.
        workers: the nodes that work, and vote, ascending.
        members: the nodes that prepare, ascending; the position is the rank in its fabric. Those that work, and spare
            ones, which may have the state of layers and compile ahead; and leaving ones while somebody may need what
            they have.
        step: the step in progress.
    """

    def __init__(
        self,
        number: int,
        proposal: Proposal,
        *,
        holdings: Mapping[NodeId, tuple[int, ...]],
        leaving: Collection[NodeId] = (),
        first_step: int,
        evaluation_step: int | None,
        now_s: float,
        restore: messages.RestorePoint | None = None,
    ) -> None:
        """Begin.

        Args:
            holdings: layers whose state after the last commit each node has.
            leaving: nodes outside the plan that are still there.
            first_step: the step to begin with.
            evaluation_step: the committed step whose evaluation comes first, if there is one.
            restore: where the state of every layer comes from; None: from those that hold it.
        """
        self.number = number
        self.proposal = proposal
        self.plan = plan = proposal.plan
        self.workers = plan.working_nodes
        lacked = {
            layer for node in self.workers for layer in plan.layers_of(node) if layer not in holdings.get(node, ())
        }
        sources = [node for node in leaving if lacked.intersection(holdings.get(node, ()))]
        self.members = tuple(sorted([*plan.nodes, *sources]))
        self.step = first_step
        self._restore = restore
        self._began_s = now_s
        self._prepared: dict[NodeId, messages.Prepared] = {}
        self._votes: dict[NodeId, messages.Vote] = {}
        self._waits: dict[NodeId, dict[NodeId, float]] = {}  # for whom a node waits, and when it last said so
        self._step_since_s = now_s
        self._recent_steps_s: deque[float] = deque(maxlen=16)
        self._has_evaluated = False
        self._evaluation = None if evaluation_step is None else self._new_evaluation(evaluation_step)

    @property
    def evaluation_step(self) -> int | None:
        """The committed step whose evaluation is not complete, if there is one."""
        return None if self._evaluation is None else self._evaluation.step

    def planned(self, reason: str) -> events.Planned:
        """Return the record of this generation's beginning."""
        return events.Planned(
            generation=self.number,
            step=self.step,
            reason=reason,
            plan=self.plan,
            plan_reason=self.proposal.reason,
        )

    def begin(
        self,
        nodes: Sequence[Node],
        *,
        fabric_address: str,
        cores: Mapping[NodeId, tuple[int, ...]],
        ahead: tuple[Stage, ...],
    ) -> messages.Begin:
        """Return what tells the members to prepare.

        Args:
            nodes: the members, ascending.
            fabric_address: of the coordination service of this generation.
            cores: to run on; nodes that may use any are left out.
            ahead: stages that plans to come may need.
        """
        return messages.Begin(
            generation=self.number,
            plan=self.plan,
            members=tuple(
                messages.Member(
                    node=node.node,
                    link_address=node.link_address,
                    cores=cores.get(node.node, ()),
                    holds=node.holds,
                )
                for node in nodes
            ),
            fabric_address=fabric_address,
            step=self.step,
            ahead=ahead,
            evaluate_first=self._evaluation is not None,
            restore=self._restore,
        )

    def add_prepared(self, prepared: messages.Prepared) -> bool:
        """Take note of a member that is prepared; return whether all are."""
        self._prepared[prepared.node] = prepared
        return len(self._prepared) == len(self.members)

    def run(self, now_s: float) -> events.Prepared:
        """Let the first step begin; return the record of the preparation."""
        self._step_since_s = now_s
        return events.Prepared(
            generation=self.number,
            step=self.step,
            seconds=now_s - self._began_s,
            num_compilations={node: self._prepared[node].num_compilations for node in self.members},
            phases={node: self._prepared[node].seconds for node in self.members},
        )

    def add_waiting(self, waiting: messages.Waiting, now_s: float) -> None:
        self._waits.setdefault(waiting.node, {})[waiting.waits_for] = now_s

    def add_vote(self, vote: messages.Vote, *, tokens_per_step: int, may_skip: bool) -> Decision | Fault | None:
        """Take note of a vote; return what the step amounts to once all are in, as `decide` does."""
        self._votes[vote.node] = vote
        self._waits.pop(vote.node, None)
        if len(self._votes) < len(self.workers):
            return None
        return decide(self._votes, tokens_per_step=tokens_per_step, may_skip=may_skip)

    def has_vote(self, node: NodeId) -> bool:
        """Whether a node may vote on the step in progress: it works, and has not voted yet."""
        return node in self.workers and node not in self._votes

    def commit(self, decision: Decision, *, evaluates: bool, now_s: float) -> events.Committed:
        """Go on to the next step; return the record of the decision."""
        step_time_s = now_s - self._step_since_s
        self._recent_steps_s.append(step_time_s)
        committed = events.Committed(
            generation=self.number,
            step=self.step,
            loss=decision.loss,
            grad_norm=decision.global_norm,
            step_time_s=step_time_s,
            seconds=_means([vote.seconds for vote in self._votes.values()]),
        )
        if evaluates:
            self._evaluation = self._new_evaluation(self.step)
        self.step += 1
        self._votes.clear()
        self._waits.clear()
        self._step_since_s = now_s
        return committed

    def add_evaluated(self, evaluated: messages.Evaluated, now_s: float) -> events.Evaluated | None:
        """Take note of an evaluation; return the record once all are in."""
        assert self._evaluation is not None
        self._evaluation.missing.remove(evaluated.node)
        self._evaluation.reports[evaluated.node] = evaluated
        if self._evaluation.missing:
            return None
        reports = [self._evaluation.reports[node] for node in self.workers if node in self._evaluation.reports]
        sums = [report.loss_sum for report in reports if report.loss_sum is not None]
        num_tokens = sum(report.num_tokens for report in reports)
        is_finite = len(sums) == len(reports) and num_tokens > 0
        self._evaluation = None
        self._has_evaluated = True
        self._step_since_s = now_s  # the next step begins only now
        return events.Evaluated(
            generation=self.number,
            step=evaluated.step,
            loss=math.fsum(sums) / num_tokens if is_finite else None,
            num_tokens=num_tokens,
        )

    def awaits_evaluation(self, evaluated: messages.Evaluated) -> bool:
        return (
            self._evaluation is not None
            and evaluated.step == self._evaluation.step
            and evaluated.node in self._evaluation.missing
        )

    def overdue_s(self, limits: Limits) -> float:
        """Return when the step, or the evaluation before it, has taken too long."""
        limit_s = limits.step_limit_s(self._recent_steps_s)
        if self._evaluation is not None and not self._has_evaluated:
            limit_s = max(limit_s, limits.first_step_s)
        return self._step_since_s + limit_s

    def yield_s(self, limits: Limits) -> float:
        """Return how long a worker that starts should leave the cores to the others, which redo the step."""
        return limits.yield_after_s(self._recent_steps_s)

    def stuck_s(self, now_s: float) -> float:
        """Return how long the step, or the evaluation before it, has been going on."""
        return now_s - self._step_since_s

    def held_up_by(self, stopped: Collection[NodeId], now_s: float) -> tuple[NodeId, ...]:
        """Return the nodes that may be the reason why nothing goes on: one, where that is clear.

        Args:
            stopped: members whose worker is stopped by a signal.
        """
        late = [node for node in self.workers if node not in self._votes]
        if self._evaluation is not None:
            late = sorted(self._evaluation.missing)
        waits = {
            node: [awaited for awaited, said_s in told.items() if now_s - said_s < _WAITING_S]
            for node, told in self._waits.items()
            if node in late
        }
        return suspects(late, waits={node: nodes for node, nodes in waits.items() if nodes}, stopped=stopped)

    def _new_evaluation(self, step: int) -> _Evaluation:
        return _Evaluation(step=step, missing=set(self.plan.holders_of(self.plan.num_layers - 1)))


def _means(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each entry; where a node has none it counts as zero."""
    names = sorted({name for item in seconds for name in item})
    return {name: math.fsum(item.get(name, 0.0) for item in seconds) / len(seconds) for name in names}
