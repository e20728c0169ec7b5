"""From votes to a decision: what a step amounts to, or why it must not count."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oobleck_jax.elastic.messages import GroupReport, Vote
from oobleck_jax.planning.plan import NodeId


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The step counts."""

    loss: float | None  # mean over the tokens of the global batch; None: not finite
    global_norm: float | None  # of the gradient, each parameter group once; None: not finite, so nobody updates


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """The step must not count."""

    node: NodeId | None  # to blame, where the votes tell
    cause: str


def decide(votes: Mapping[NodeId, Vote], *, tokens_per_step: int, may_skip: bool = False) -> Decision | Fault:
    """Weigh the votes of all nodes of a generation.

    The sums are exact (`math.fsum`), so that neither the order of votes nor who holds what changes a bit of them.

    Args:
        may_skip: a gradient that is not finite is no fault: the step counts, but no node updates.
    """
    ordered = [votes[node] for node in sorted(votes)]
    step = ordered[0].step
    first: dict[str, GroupReport] = {}  # of each group, what its first holder says
    odd: set[str] = set()
    for vote in ordered:
        for report in vote.groups:
            other = first.setdefault(report.group, report)
            if report.checksum != other.checksum or report.squared_norm != other.squared_norm:
                odd.add(report.group)

    faults = [fault for vote in ordered if (fault := _not_finite(vote, step))]
    if faults and not may_skip:
        return faults[0]
    if odd and not faults:  # what is not used need not agree
        return _discord(min(odd), ordered)
    num_tokens = sum(vote.num_tokens for vote in ordered)
    if num_tokens != tokens_per_step:
        shares = ", ".join(f"node {vote.node}: {vote.num_tokens}" for vote in ordered if vote.num_tokens)
        cause = f"step {step} has {tokens_per_step} tokens, but the losses cover {num_tokens} ({shares})"
        return Fault(node=None, cause=cause)

    losses = [vote.loss_sum for vote in ordered if vote.loss_sum is not None]
    loss = math.fsum(losses) / num_tokens if len(losses) == len(ordered) else None
    if faults:
        return Decision(loss=loss, global_norm=None)
    squared_norm = math.fsum(report.squared_norm or 0.0 for report in first.values())
    return Decision(loss=loss, global_norm=math.sqrt(squared_norm))


def _not_finite(vote: Vote, step: int) -> Fault | None:
    groups = [report.group for report in vote.groups if report.squared_norm is None]
    if vote.is_finite and vote.loss_sum is not None and not groups:
        return None
    where = f"the gradient of {groups[0]}" if groups else "the loss" if vote.loss_sum is None else "a gradient"
    cause = (
        f"step {step} diverged: {where} on node {vote.node} is not finite; "
        "lower --peak-learning-rate, raise --warmup-steps, or let a few such steps in a row be skipped by --skip-steps"
    )
    return Fault(node=vote.node, cause=cause)


def _discord(group: str, votes: Sequence[Vote]) -> Fault:
    """Say which holders of a group saw something else: they summed the same contributions, so every bit must agree."""
    step = votes[0].step
    reports = [(vote.node, report) for vote in votes for report in vote.groups if report.group == group]
    seen = Counter((report.squared_norm, report.checksum) for _, report in reports)
    (most_common, count), *_ = seen.most_common()
    odd = [node for node, report in reports if (report.squared_norm, report.checksum) != most_common]
    has_majority = 2 * count > len(reports)
    values = ", ".join(
        f"node {node}: squared norm {report.squared_norm!r}, checksum {report.checksum:#x}" for node, report in reports
    )
    who = f"node {odd[0]} differs from the others" if has_majority else "the holders differ"
    cause = f"step {step}: the summed gradient of {group} is not the same everywhere, {who} ({values})"
    return Fault(node=odd[0] if has_majority else None, cause=cause)
