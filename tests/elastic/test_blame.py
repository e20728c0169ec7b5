import signal

import pytest

from oobleck_jax.elastic.blame import Cause, Evidence, Weight, cause_of_exit, cause_of_failure, describe_exit, suspects
from oobleck_jax.elastic.messages import Failed, WorkerExited
from oobleck_jax.planning.plan import NodeId


def cause(node: int, weight: Weight, noticed_s: float) -> Cause:
    return Cause(node=NodeId(node), weight=weight, what=f"node {node}", noticed_s=noticed_s)


def test_the_heaviest_evidence_counts_and_the_earliest_of_equals() -> None:
    causes = [
        cause(0, Weight.COLLATERAL, 1.0),
        cause(1, Weight.OWN, 1.1),
        cause(2, Weight.OWN, 1.2),
        cause(3, Weight.COLLATERAL, 1.3),
    ]
    evidence = Evidence()
    for item in causes:
        evidence.add(item)
    assert evidence.since_s == causes[0].noticed_s
    assert evidence.take()[0].node == 1
    assert evidence.take() == ()
    for item in (*causes, cause(4, Weight.FIRM, 1.4)):
        evidence.add(item)
    assert evidence.take()[0].node == 4


@pytest.mark.parametrize(
    ("exit_code", "weight", "words", "is_error"),
    [
        (-signal.SIGKILL, Weight.FIRM, "was killed by SIGKILL (kill -9, or out of memory)", False),
        (-signal.SIGTERM, Weight.FIRM, "was killed by SIGTERM", False),
        (-signal.SIGSEGV, Weight.FIRM, "was killed by SIGSEGV", True),
        (-signal.SIGABRT, Weight.OWN, "was killed by SIGABRT", True),  # JAX's runtime aborts when a peer is gone
        (3, Weight.OWN, "ended with exit code 3", True),
    ],
)
def test_how_a_worker_ended_says_how_much_it_explains(
    exit_code: int, weight: Weight, words: str, is_error: bool
) -> None:
    exited = WorkerExited(node=NodeId(2), incarnation=0, exit_code=exit_code, log_tail="tail")
    found = cause_of_exit(exited, 5.0)
    assert (found.weight, found.what, found.detail) == (weight, f"the worker of node 2 {words}", "tail")
    assert found.record(generation=1, step=0, is_collateral=False).is_error is is_error


def test_a_worker_that_could_not_be_started_has_no_log() -> None:
    exited = WorkerExited(node=NodeId(2), incarnation=0, exit_code=127, is_started=False, log_tail="no such file")
    found = cause_of_exit(exited, 5.0)
    assert (found.weight, found.what) == (Weight.OWN, "the worker of node 2 could not be started: no such file")
    assert (found.detail, found.is_error) == ("", False)


def test_an_unknown_signal_is_described() -> None:
    assert describe_exit(-99) == "was killed by signal 99"


@pytest.mark.parametrize(
    ("error", "blames", "is_collateral"),
    [
        ("PeerLost: the link to node 1 broke", None, True),
        ("Stalled: nothing for 3 s", None, True),
        ("XlaRuntimeError: reset", 1, True),
        ("ValueError: PeerLost", None, False),
    ],
)
def test_a_failure_knows_whether_it_is_a_consequence(error: str, blames: NodeId | None, is_collateral: bool) -> None:
    failed = Failed(node=NodeId(0), incarnation=0, generation=1, error=error, traceback="", blames=blames)
    assert failed.is_collateral is is_collateral
    assert cause_of_failure(failed, 5.0).is_error is not is_collateral


@pytest.mark.parametrize(
    ("late", "waits", "stopped", "expected"),
    [
        ((0, 1, 2), {}, (2,), (2,)),  # a stopped worker explains everything
        ((0, 1, 2), {0: [1], 2: [1]}, (), (1,)),  # the others wait for it, it waits for nobody
        ((0, 1, 2, 3), {0: [1], 1: [2, 0]}, (), (2,)),  # at the end of a chain
        ((0, 1), {0: [1], 1: [0]}, (), (0, 1)),  # they wait for each other
        ((0, 1, 2), {0: [2]}, (), (2,)),
        ((0, 1), {0: [3]}, (), (1,)),  # node 3 has done its part; node 1 does not say why it is late
        ((1, 0), {}, (), (0, 1)),
    ],
)
def test_the_node_at_the_end_of_the_chain_of_waits_is_the_suspect(
    late: tuple[NodeId, ...],
    waits: dict[NodeId, list[NodeId]],
    stopped: tuple[NodeId, ...],
    expected: tuple[int, ...],
) -> None:
    assert suspects(late, waits=waits, stopped=stopped) == expected
