"""Workers that go through many generations: nothing is compiled on the way, and nothing is left behind."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oobleck_jax.elastic import messages
from oobleck_jax.planning.plan import NodeId, Stage
from tests.end_to_end.worker_pair import LIMIT_S, Pair, worker_pair
from tests.execution.thread_cluster import plan_of


pytestmark = [pytest.mark.process, pytest.mark.jax_version]

# Alternately a pipeline over both, and a whole replica on each: states are copied, and sums made, in each change.
PLANS = (plan_of(([3, 3], 8)), plan_of(([6], 4), ([6], 4)))
# What may be there that was not before: a thread of a pool, and a link, which is made when it is needed.
SPARE = {"threads": 1, "files": 4}
FREE_LIMIT_S = 8.0  # workers try for five seconds to free what is stuck
AHEAD = tuple(Stage(first_layer=first, end_layer=end) for first, end in ((0, 3), (3, 6), (0, 6)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("recoveries")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Pair]:
    """Two workers that have run one generation, and have compiled ahead in it."""
    with worker_pair(folder) as pair:
        settled_usage(pair)
        yield pair


def go_through(pair: Pair, count: int) -> None:
    for _ in range(count):
        pair.run(PLANS[pair.generation % 2], ahead=AHEAD)


@pytest.mark.timeout(2 * LIMIT_S)
def test_nothing_is_compiled_between_a_loss_and_the_next_commit(pair: Pair, folder: Path) -> None:
    go_through(pair, 4)
    for worker in pair.workers:
        first, *later = worker.prepared
        assert first.num_new_compilations > 0
        assert [prepared.num_new_compilations for prepared in later] == [0, 0, 0, 0]
        assert later[0].received_bytes > 0
        log = (folder / f"node-{worker.node}.log").read_text()
        assert not re.findall(r"programs were compiled in step .* of generation [2-9]", log)


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_node_that_comes_later_compiles_nothing_when_it_is_taken_in(pair: Pair) -> None:
    pair.run(PLANS[1], ahead=AHEAD)
    pair.workers.pop().close()
    pair.start(NodeId(1), ahead=AHEAD)
    pair.await_ready()
    for plan in PLANS:
        pair.run(plan, ahead=AHEAD)
    assert [prepared.num_new_compilations for prepared in pair.workers[1].prepared] == [0, 0]
    assert pair.workers[1].prepared[0].received_bytes > 0


def check_usage(pair: Pair, count: int) -> None:
    """Go through many generations; compare what the workers use with what they used before."""
    before = settled_usage(pair)
    go_through(pair, count - 1)
    assert_usage(pair, before)


def settled_usage(pair: Pair) -> list[dict[str, int]]:
    """Go through a generation in which workers have the time to free what was dropped before; return what they use."""
    with quiet_generation(pair):
        time.sleep(FREE_LIMIT_S)  # nothing tells when it is done
        return [worker.usage() for worker in pair.workers]


def assert_usage(pair: Pair, before: list[dict[str, int]]) -> None:
    """Await, in a generation that nothing happens to, that the workers use what they used before.

    A sum that was cut off hangs, and holds its fabric, until the other node has freed its end in this generation.
    """
    with quiet_generation(pair):
        deadline_s = time.monotonic() + FREE_LIMIT_S
        while True:
            after = [worker.usage() for worker in pair.workers]
            used = list(zip(before, after, strict=True))
            if all(new[kind] <= old[kind] + spare for kind, spare in SPARE.items() for old, new in used):
                break
            assert time.monotonic() < deadline_s, used
            time.sleep(0.1)
        for old, new in used:
            assert new["bytes"] <= old["bytes"] * 1.05, (old, new)


@contextmanager
def quiet_generation(pair: Pair) -> Iterator[None]:
    """Run a step and compile ahead; abandon the generation in the end."""
    pair.run(PLANS[0], ahead=AHEAD, abandon=False)
    for worker in pair.workers:
        while (told := worker.expect(messages.CompiledAhead)) and told.done < told.total:
            pass
    try:
        yield
    finally:
        pair.abandon()


@pytest.mark.timeout(2 * LIMIT_S)
def test_ten_recoveries_leave_nothing_behind(pair: Pair) -> None:
    go_through(pair, 2)
    check_usage(pair, 10)


@pytest.mark.slow
@pytest.mark.timeout(10 * LIMIT_S)
def test_fifty_recoveries_leave_nothing_behind(pair: Pair) -> None:
    go_through(pair, 4)
    check_usage(pair, 45)
