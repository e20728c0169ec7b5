import pytest

from oobleck_jax.launch import place, place_at_start
from oobleck_jax.plan_text import parse_plan
from oobleck_jax.planning.plan import NodeId


@pytest.mark.parametrize(
    ("text", "cores", "expected"),
    [
        # one node has all cores
        ("0-10", (0, 1), {0: (0, 1)}),
        # the stages of a pipeline are spread over its cores, in order
        ("0-5,5-10", (0, 1), {0: (0,), 1: (1,)}),
        ("0-3,3-5,5-8,8-10", (0, 1), {0: (0,), 1: (0,), 2: (1,), 3: (1,)}),
        ("0-5,5-10", (0, 1, 2, 3), {0: (0, 1), 1: (2, 3)}),
        # as many pipelines as cores: each on one
        ("0-5,5-10 | 0-5,5-10", (0, 1), {0: (0,), 1: (0,), 2: (1,), 3: (1,)}),
        # more: the longest first, on the core that has the least to do
        ("0-10:2 | 0-10:2 | 0-10:4", (0, 1), {2: (0,), 0: (1,), 1: (1,)}),
        # fewer: whoever has more to do for each of its cores gets the next one
        ("0-5,5-10:6 | 0-10:2", (0, 1, 2, 3), {0: (0,), 1: (1, 2), 2: (3,)}),
        ("0-10", (), {}),
    ],
)
def test_a_pipeline_stays_on_cores_of_its_own(
    text: str, cores: tuple[int, ...], expected: dict[int, tuple[int, ...]]
) -> None:
    assert place(parse_plan(text, num_microbatches=8), cores=cores) == expected


def test_before_there_is_a_plan_nodes_take_turns() -> None:
    def start(num_nodes: int, cores: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
        return [place_at_start(NodeId(node), num_nodes=num_nodes, cores=cores) for node in range(num_nodes)]

    assert start(3, (4, 6)) == [((4,), 1), ((6,), 1), ((4,), 1)]
    assert start(2, (4, 6)) == [((4,), 1), ((6,), 1)]
    assert start(1, (4, 6)) == [((4, 6), 2)]
    assert start(3, (0, 1, 2, 3)) == [((0,), 1), ((1,), 1), ((2, 3), 2)]
    assert start(2, ()) == [((), 0), ((), 0)]
