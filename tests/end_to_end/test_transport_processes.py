"""Link and fabric between real processes, with real kills."""

import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from oobleck_jax.execution.jaxlib_private import start_coordination_service
from tests.end_to_end.transport_processes import (
    Member,
    Members,
    all_tell,
    coordination_service,
    free_address,
    meet,
    value,
)


pytestmark = [pytest.mark.process, pytest.mark.jax_version]

LENGTH = 100_000
ENDINGS = {"PeerLost", "Abandoned"}


@pytest.fixture(scope="module")
def members() -> Iterator[Members]:
    started = Members()
    yield started
    started.end()


def sum_of(group: list[Member], *, length: int = LENGTH) -> bytes:
    """Let the members sum a vector each, check the sum, and return its bytes, which must be the same for all."""
    ranks = list(range(len(group)))
    for rank, member in enumerate(group):
        member.tell("sum", ranks=ranks, length=length, seed=rank, limit_s=20.0)
    (total,) = {value(member.answer()) for member in group}
    expected = sum(np.random.default_rng(rank).standard_normal(length, dtype=np.float32) for rank in ranks)
    np.testing.assert_allclose(np.frombuffer(bytes.fromhex(total), np.float32), expected[:1000], atol=1e-5)
    return total


def doomed_sum_ends(survivors: list[Member], *, num_nodes: int) -> None:
    """Let survivors take part in a sum with a dead member, spread the news of the death, and check that all get out."""
    for rank, member in enumerate(survivors):
        member.tell("sum", ranks=list(range(num_nodes)), length=LENGTH, seed=rank, limit_s=20.0)
    time.sleep(0.5)
    for member in survivors:
        member.tell("abandon")
    answers = [member.answer() for member in survivors]
    assert {answer.get("error") for answer in answers} <= ENDINGS, answers


@pytest.mark.parametrize("num_nodes", [3, 4])
def test_a_node_dies_before_a_sum_and_the_survivors_go_on_without_it(members: Members, num_nodes: int) -> None:
    with members.take(num_nodes) as group:
        with coordination_service(num_nodes) as (address, service):
            for answer in meet(group, address, [(tuple(range(num_nodes)), LENGTH), ((0, 1), 7)]):
                value(answer)
            service.kill()  # all have detached: its end must harm nobody
            service.wait(timeout=10)
        sum_of(group)
        survivors = group[:-1]
        group[-1].kill()
        doomed_sum_ends(survivors, num_nodes=num_nodes)
        grown = [value(answer) for answer in all_tell(survivors, "grow")]
        all_tell(survivors, "close")
        with coordination_service(len(survivors)) as (address, _):
            for answer in meet(survivors, address, [(tuple(range(len(survivors))), LENGTH)]):
                value(answer)
            sum_of(survivors)
        assert [value(answer) for answer in all_tell(survivors, "grow")] == [weight + 1 for weight in grown]


@pytest.mark.parametrize("num_nodes", [3, 4])
def test_a_node_dies_in_the_middle_of_a_sum_and_the_survivors_go_on_without_it(
    members: Members, num_nodes: int
) -> None:
    big = 5_000_000
    with members.take(num_nodes) as group:
        with coordination_service(num_nodes) as (address, _):
            for answer in meet(group, address, [(tuple(range(num_nodes)), big)]):
                value(answer)
        for rank, member in enumerate(group):
            member.tell("sum", ranks=list(range(num_nodes)), length=big, seed=rank, limit_s=20.0, repeats=1000)
        time.sleep(1.0)
        victim, survivors = group[1], [group[0], *group[2:]]
        victim.kill()
        time.sleep(0.5)
        for member in survivors:
            member.tell("abandon")
        answers = [member.answer() for member in survivors]
        assert {answer.get("error") for answer in answers} <= ENDINGS, answers
        all_tell(survivors, "close")
        with coordination_service(len(survivors)) as (address, _):
            for answer in meet(survivors, address, [(tuple(range(len(survivors))), LENGTH)]):
                value(answer)
            sum_of(survivors)


def test_a_node_that_stops_stalls_a_sum_and_one_that_never_comes_a_meeting(members: Members) -> None:
    with members.take(3) as group:
        with coordination_service(3) as (address, _):
            for answer in meet(group, address, [((0, 1, 2), LENGTH)]):
                value(answer)
        survivors = group[:-1]
        group[-1].kill(signal.SIGSTOP)
        for rank, member in enumerate(survivors):
            member.tell("sum", ranks=[0, 1, 2], length=LENGTH, seed=rank, limit_s=0.5)
        assert [member.answer()["error"] for member in survivors] == ["Stalled", "Stalled"]
        all_tell(survivors, "close")  # although a sum still hangs in each
        group[-1].kill()
        with coordination_service(3) as (address, _):  # the third never comes
            for rank, member in enumerate(survivors):
                member.tell("connect", address=address, rank=rank, num_nodes=3, sums=[], limit_s=30.0)
            time.sleep(0.5)
            for member in survivors:
                member.tell("abandon")
            assert [member.answer()["error"] for member in survivors] == ["Abandoned", "Abandoned"]
        with coordination_service(2) as (address, _):
            for answer in meet(survivors, address, [((0, 1), LENGTH)]):
                value(answer)
            sum_of(survivors)


def test_a_meeting_that_was_given_up_harms_nobody_when_a_latecomer_completes_it(members: Members) -> None:
    with members.take(2) as group:
        with coordination_service(2) as (address, _):
            for rank, member in enumerate(group):
                member.tell("connect", address=address, rank=rank, num_nodes=2, sums=[], limit_s=1.0)
                time.sleep(0.3)
                member.tell("abandon")
                assert member.answer()["error"] == "Abandoned"
        time.sleep(0.3)  # the end of the service would abort a process that is still attached to it
        with coordination_service(2) as (address, _):
            for answer in meet(group, address, [((0, 1), LENGTH)]):
                value(answer)
            sum_of(group)


def test_generations_leave_no_threads_files_or_memory_behind(members: Members) -> None:
    usages: list[dict[str, int]] = []
    with members.take(2) as group:
        for _ in range(12):
            address = free_address()
            service = start_coordination_service(address, 2)
            for answer in meet(group, address, [((0, 1), LENGTH)]):
                value(answer)
            sum_of(group)
            all_tell(group, "close")
            service.close()
            usages.append(group[0].ask("usage"))
    early, late = usages[3], usages[11]
    assert late["num_threads"] <= early["num_threads"] + 1, usages
    assert late["num_files"] <= early["num_files"] + 1, usages
    assert late["rss_mb"] <= early["rss_mb"] + 30, usages


def test_a_pull_from_a_dead_node_ends_and_others_go_on(members: Members) -> None:
    with members.take(3) as (consumer, producer, other):
        address, other_address = producer.ask("address"), other.ask("address")
        producer.ask("offer", item=1, num_bytes=1 << 20)
        assert consumer.ask("pull", address=address, item=1, num_bytes=1 << 20, limit_s=10.0) == [1.0, 1.0]
        consumer.tell("pull", address=address, item=2, num_bytes=1 << 20, limit_s=10.0)  # is never offered
        time.sleep(0.2)
        producer.kill()
        answer = consumer.answer()
        assert answer["error"] == "PeerLost", answer
        consumer.tell("pull", address=address, item=3, num_bytes=1 << 20, limit_s=10.0)
        assert consumer.answer()["error"] == "PeerLost"
        other.ask("offer", item=4, num_bytes=1 << 20)
        assert consumer.ask("pull", address=other_address, item=4, num_bytes=1 << 20, limit_s=10.0) == [4.0, 4.0]


def test_a_node_dies_in_the_middle_of_a_transfer_and_the_link_still_works(members: Members) -> None:
    big = 1 << 28
    with members.take(3) as (consumer, producer, other):
        address, other_address = producer.ask("address"), other.ask("address")
        producer.ask("offer", item=1, num_bytes=big)
        consumer.tell("pull", address=address, item=1, num_bytes=big, limit_s=10.0)
        time.sleep(0.05)
        producer.kill()
        answer = consumer.answer()
        assert answer.get("error") == "PeerLost", answer
        other.ask("offer", item=2, num_bytes=1 << 20)
        assert consumer.ask("pull", address=other_address, item=2, num_bytes=1 << 20, limit_s=10.0) == [2.0, 2.0]


def test_drained_offers_give_their_memory_back_and_their_keys_are_free_again(members: Members) -> None:
    with members.take(2) as (producer, consumer):
        address = producer.ask("address")
        before_mb = producer.ask("usage")["rss_mb"]
        for item in range(4):
            producer.ask("offer", item=item, num_bytes=1 << 26)
        assert consumer.ask("pull", address=address, item=0, num_bytes=1 << 26, limit_s=10.0) == [0.0, 0.0]
        offered_mb = producer.ask("usage")["rss_mb"] - before_mb
        assert offered_mb > 150, "offers that nobody pulls keep their memory"
        producer.ask("drain")
        time.sleep(0.2)
        drained_mb = producer.ask("usage")["rss_mb"] - before_mb
        assert drained_mb < 64, f"{drained_mb} MB of {offered_mb} MB are still there"
        producer.ask("offer", item=1, num_bytes=1 << 20)
        assert consumer.ask("pull", address=address, item=1, num_bytes=1 << 20, limit_s=10.0) == [1.0, 1.0]
