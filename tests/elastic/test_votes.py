import math
from collections.abc import Mapping
from typing import Any

from oobleck_jax.elastic.messages import GroupReport, Vote, decode_to_coordinator, encode
from oobleck_jax.elastic.votes import Decision, Fault, decide
from oobleck_jax.planning.plan import NodeId


def vote(node: int, *, norms: Mapping[str, float | None], num_tokens: int = 0, **changes: Any) -> Vote:
    values: dict[str, Any] = {
        "loss_sum": 2.0 * num_tokens,
        "is_finite": True,
        "groups": tuple(GroupReport(group=group, squared_norm=norm, checksum=7) for group, norm in norms.items()),
    }
    return Vote(node=NodeId(node), generation=1, step=4, num_tokens=num_tokens, seconds={}, **{**values, **changes})


def by_node(*votes: Vote) -> dict[NodeId, Vote]:
    return {vote.node: vote for vote in votes}


def test_every_group_counts_once_however_many_hold_it() -> None:
    one = by_node(vote(0, norms={"a": 9.0, "b": 16.0}, num_tokens=10))
    four = by_node(
        vote(0, norms={"a": 9.0}),
        vote(1, norms={"b": 16.0}, num_tokens=5),
        vote(2, norms={"a": 9.0}),
        vote(3, norms={"b": 16.0}, num_tokens=5),
    )
    assert decide(one, tokens_per_step=10) == decide(four, tokens_per_step=10) == Decision(loss=2.0, global_norm=5.0)


def test_the_order_of_votes_changes_no_bit() -> None:
    votes = [vote(node, norms={f"g{node}": 0.1 * 3**node}, num_tokens=1, loss_sum=0.1 * 7**node) for node in range(9)]
    assert decide(by_node(*votes), tokens_per_step=9) == decide(by_node(*reversed(votes)), tokens_per_step=9)


def test_a_minority_that_differs_is_named() -> None:
    odd = (GroupReport(group="block 3", squared_norm=9.0, checksum=8),)
    votes = by_node(
        vote(0, norms={"block 3": 9.0}), vote(1, norms={}, groups=odd), vote(2, norms={"block 3": 9.0}, num_tokens=1)
    )
    fault = decide(votes, tokens_per_step=1)
    assert isinstance(fault, Fault)
    assert fault.node == 1
    assert "step 4: the summed gradient of block 3" in fault.cause
    assert "node 1 differs from the others" in fault.cause
    assert "checksum 0x8" in fault.cause


def test_of_two_that_differ_none_is_named() -> None:
    fault = decide(by_node(vote(0, norms={"a": 1.0}), vote(1, norms={"a": 1.0 + 1e-15})), tokens_per_step=0)
    assert isinstance(fault, Fault)
    assert fault.node is None
    assert "the holders differ (node 0: squared norm 1.0, " in fault.cause


def test_tokens_that_are_missing_or_counted_twice_are_a_fault() -> None:
    fault = decide(by_node(vote(0, norms={}, num_tokens=3), vote(1, norms={}, num_tokens=3)), tokens_per_step=4)
    assert fault == Fault(node=None, cause="step 4 has 4 tokens, but the losses cover 6 (node 0: 3, node 1: 3)")


def test_what_is_not_finite_is_a_fault_that_says_where() -> None:
    for changes, where in (
        ({"norms": {"a": None}}, "the gradient of a on node 0 is"),
        ({"norms": {}, "loss_sum": None}, "the loss on node 0 is"),
        ({"norms": {}, "is_finite": False}, "a gradient on node 0 is"),
    ):
        fault = decide(by_node(vote(0, num_tokens=1, **changes), vote(1, norms={})), tokens_per_step=1)
        assert isinstance(fault, Fault)
        assert fault.node == 0
        assert f"step 4 diverged: {where} not finite; lower --peak-learning-rate" in fault.cause


def test_a_step_that_may_be_skipped_counts_without_a_norm() -> None:
    for changes, loss in (({"norms": {"a": None}}, 2.0), ({"norms": {}, "loss_sum": None}, None)):
        other = vote(1, norms={"a": 1.0}, num_tokens=1)
        decision = decide(by_node(vote(0, num_tokens=1, **changes), other), tokens_per_step=2, may_skip=True)
        assert decision == Decision(loss=loss, global_norm=None)
    assert isinstance(decide(by_node(vote(0, norms={"a": None})), tokens_per_step=2, may_skip=True), Fault)


def test_a_sum_that_is_not_finite_travels_as_null() -> None:
    sent = vote(0, norms={"a": math.nan}, num_tokens=1, loss_sum=math.inf)
    received = decode_to_coordinator(encode(sent))
    assert isinstance(received, Vote)
    assert received.loss_sum is None
    assert received.groups[0].squared_norm is None
