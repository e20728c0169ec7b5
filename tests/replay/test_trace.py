import re
from pathlib import Path

import pytest

from oobleck_jax.replay.trace import Change, TraceError, parse_trace, read_trace


def test_events_are_in_milliseconds_and_begin_with_the_first_node() -> None:
    trace = parse_trace("# spot\n5000,add,a\n5000,add,b\n\n7500,remove,a\n9000,add,a\n", name="t")
    assert trace.duration_s == 4.0
    assert trace.changes == (Change(time_s=0.0, joined=(0, 1)), Change(time_s=2.5, left=(0,)))
    assert (trace.num_losses, trace.most_nodes) == (1, 2)
    assert trace.mean_nodes == pytest.approx((4 + 2.5) / 4)


def test_counts_are_in_seconds_and_the_seed_decides_who_leaves() -> None:
    text = "0,5\n10,2\n20,4\n30,4\n"
    trace = parse_trace(text, name="t", seed=1)
    assert [(change.time_s, len(change.joined), len(change.left)) for change in trace.changes] == [
        (0.0, 5, 0),
        (10.0, 0, 3),
        (20.0, 2, 0),
    ]
    assert trace.changes[2].joined == (5, 6)  # nobody comes back under an old name
    assert parse_trace(text, name="t", seed=1) == trace
    assert len({parse_trace(text, name="t", seed=seed).changes[1].left for seed in range(9)}) > 1


def test_the_unit_of_time_can_be_given() -> None:
    assert parse_trace("0,5\n2,4\n", name="t", unit_s=3600).duration_s == 7200
    assert parse_trace("0,add,a\n2,remove,a\n", name="t", unit_s=1).duration_s == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,add,a\n1,remove,b\n", "line 2: remove b, but it is not there"),
        ("0,add,a\n# x\n1,add,a\n", "line 3: add a, but it is there already"),
        ("0,add,a\n1,drop,a\n", "line 2: 'drop' is neither add nor remove"),
        ("9,add,a\n1,remove,a\n", "line 2: time 1 is before the line above"),
        ("0,add,a\nx,remove,a\n", "line 2: 'x' is no time"),
        ("0,add,a\nnan,remove,a\n", "line 2: time nan is before the line above, or no time"),
        ("0,add,a\n1,5\n", "line 2: '1,5' is neither time,add|remove,node nor time,count"),
        ("0,4\n1,-1\n", "line 2: '-1' is no number of nodes"),
        ("\n# nothing\n", "has no line with a change"),
        ("0,0\n5,0\n", "has 0 nodes and lasts 5 s; it needs a node, and a later line or --hours"),
    ],
)
def test_an_error_names_the_line(text: str, message: str) -> None:
    with pytest.raises(TraceError, match=re.escape(message)):
        parse_trace(text, name="t")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.csv: No such file or directory; give a file, or a recipe"):
        read_trace(tmp_path / "none.csv")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match=r"a\.csv is no text: "):
        read_trace(tmp_path / "a.csv", seed=0)


def test_nodes_that_come_later_have_to_start_and_those_that_leave_before_were_never_live() -> None:
    trace = parse_trace("0,add,a\n1000,add,b\n2000,add,c\n30000,remove,b\n90000,remove,c\n", name="t").starting(45)
    assert trace.changes == (Change(time_s=0.0, joined=(0,)), Change(time_s=47.0, joined=(2,)))


def test_a_longer_trace_keeps_its_last_nodes_and_a_shorter_one_is_cut() -> None:
    trace = parse_trace("0,add,a\n0,add,b\n5000,remove,a\n9000,remove,b\n", name="t")
    assert trace.within(7.0).changes[-1].left == (0,)
    assert trace.within(100.0).mean_nodes == pytest.approx((5 + 100) / 100)


def test_notice_comes_before_the_end() -> None:
    trace = parse_trace("0,add,a\n0,add,b\n50000,remove,a\n60000,add,c\n", name="t")
    told = type(trace)(name="t", duration_s=60, lives=trace.lives, notice_s=30.0)
    assert [(change.time_s, change.leaving, change.left) for change in told.changes] == [
        (0.0, (), ()),
        (20.0, (0,), ()),
        (50.0, (), (0,)),
    ]
