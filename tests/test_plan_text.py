from pathlib import Path

import msgspec
import pytest

from oobleck_jax.config import ScheduleKind
from oobleck_jax.errors import PlanError
from oobleck_jax.plan_text import parse_plan, read_plan
from oobleck_jax.planning.plan import NodeId, check_plan


def test_a_line_says_layers_nodes_and_microbatches() -> None:
    plan = parse_plan("0-5,5-10:6 | 0-10:2", num_microbatches=8)
    check_plan(plan, num_layers=10, num_microbatches=8)
    assert [pipeline.nodes for pipeline in plan.pipelines] == [(0, 1), (2,)]
    assert [pipeline.num_microbatches for pipeline in plan.pipelines] == [6, 2]
    assert plan.layers_of(plan.pipelines[0].nodes[1]) == (5, 6, 7, 8, 9)


@pytest.mark.parametrize(
    ("text", "total", "expected"),
    [
        ("0-10", 8, [8]),
        ("0-5,5-10 | 0-10", 9, [6, 3]),
        ("0-10 | 0-10 | 0-10", 8, [3, 3, 2]),
        ("0-10 | 0-10:5", 8, [3, 5]),
        ("0-5,5-10 | 0-10", 2, [1, 1]),
    ],
)
def test_microbatches_are_shared_by_nodes_where_the_line_does_not_say(
    text: str, total: int, expected: list[int]
) -> None:
    plan = parse_plan(text, num_microbatches=total)
    assert [pipeline.num_microbatches for pipeline in plan.pipelines] == expected


def test_a_stage_may_have_several_devices() -> None:
    (first, second) = parse_plan("0-5/2,5-10/2", num_microbatches=4).pipelines[0].template.stages
    assert (first.num_devices, second.num_devices, second.node_index) == (2, 2, 1)


def test_a_file_says_the_same_as_json(tmp_path: Path) -> None:
    plan = parse_plan("0-5,5-10 | 0-10", num_microbatches=8)
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode(plan))
    assert read_plan(str(path), num_microbatches=8) == plan


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not a stage"),
        ("0-5;5-10", "'0-5;5-10' is not a stage; write FIRST-END"),
        ("0-5,5", "'5' is not a stage"),
        ("0-10:x", "'x' is not a number of microbatches"),
        ("0-10:8 | 0-10", "8 microbatches are not enough"),
        ("0-10 | 0-10 | 0-10", "2 microbatches are not enough"),
        ("absent.json", "absent.json: No such file"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        read_plan(text, num_microbatches=2 if text.count("|") == 2 else 8)


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"pipelines": 3}')
    with pytest.raises(PlanError, match="is not a plan: Expected `array`"):
        read_plan(str(path), num_microbatches=8)


def test_several_stages_on_the_same_devices_are_interleaved() -> None:
    plan = parse_plan("0-3@0,3-5@1,5-8@0,8-10@1 | 0-10", num_microbatches=8)
    check_plan(plan, num_layers=10, num_microbatches=8)
    assert [pipeline.schedule for pipeline in plan.pipelines] == [ScheduleKind.INTERLEAVED, ScheduleKind.ONE_F_ONE_B]
    assert plan.layers_of(NodeId(0)) == (0, 1, 2, 5, 6, 7)
    assert plan.pipelines[0].nodes == (0, 1)


def test_an_interleaved_pipeline_takes_its_devices_in_turn() -> None:
    for text in ("0-3@0,3-5@1,5-8@1,8-10@0", "0-3@0,3-5@1,5-10@0"):
        with pytest.raises(
            PlanError, match=r"is interleaved, but its . stages do not take the 2 sets of devices in turn"
        ):
            check_plan(parse_plan(text, num_microbatches=8), num_layers=10, num_microbatches=8)
