import io

import pytest
from rich.console import Console

from oobleck_jax import events
from oobleck_jax.node_logs import NodeLogs
from oobleck_jax.plan_text import parse_plan
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.progress import (
    LineDisplay,
    Story,
    describe_layers,
    failure_text,
    format_duration,
    make_display,
    plan_table,
)


NAMES = ("embedding", "block 0", "block 1", "block 2", "head")


def story() -> Story:
    return Story(num_nodes=2, steps=100, tokens_per_step=1000, logs=NodeLogs("here"))


def joined(node: int) -> events.Joined:
    return events.Joined(node=NodeId(node), name="host", incarnation=0)


def ready(node: int) -> events.Ready:
    return events.Ready(node=NodeId(node), incarnation=0, device_kind="cpu", num_devices=1, seconds=1.0)


def advanced(node: int, done: int) -> events.Advanced:
    return events.Advanced(node=NodeId(node), generation=1, phase="compile", done=done, total=10)


def committed(step: int, step_time_s: float = 0.5) -> events.Committed:
    return events.Committed(generation=1, step=step, loss=4.25, grad_norm=1.0, step_time_s=step_time_s)


def test_the_start_of_the_nodes_is_told() -> None:
    told = story()
    texts: list[str] = []
    for record in (joined(0), joined(1), ready(1), ready(0), advanced(0, 3), advanced(1, 5)):
        told.take(record)
        texts.append(told.start_up)
    assert texts == [
        "1 of 2 nodes joined, 0 ready",
        "2 of 2 nodes joined, 0 ready",
        "2 of 2 nodes joined, 1 ready",
        "2 nodes ready",
        "compile 3 of 10",
        "compile 8 of 20",
    ]


def test_training_is_told_by_loss_speed_and_time_left() -> None:
    told = story()
    assert told.training == "..."
    for step in range(10):
        told.take(committed(step))
    assert told.training == "loss 4.2500  2,000 tokens/s  45 s left"


def test_lines_come_at_most_every_few_seconds_but_for_events() -> None:
    lines: list[str] = []
    now_s = 0.0
    display = LineDisplay(story(), write=lines.append, clock=lambda: now_s, every_s=5.0)
    for step in range(100):
        now_s += 0.5
        display.show(committed(step))
        if step == 3:
            display.show(events.Evaluated(generation=1, step=3, loss=4.0, num_tokens=2000))
    assert lines[0].startswith("step 0/100  loss 4.2500")
    assert lines[1] == "after step 3: evaluation loss 4.0000 over 2,000 tokens"
    assert [line.split()[1] for line in lines[2:]] == [f"{step}/100" for step in (*range(10, 100, 10), 99)]


def test_a_terminal_gets_a_bar() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, highlight=False)
    display = make_display(num_nodes=2, steps=100, tokens_per_step=1000, logs=NodeLogs("here"), stream=console)
    display.note("the plan")
    display.show(events.Started(preset="p", num_nodes=2, fault_tolerance=0, steps=100, config_digest="", versions={}))
    display.show(ready(0))
    display.show(failed(detail="[red]no markup[/] \x1b[2J :boom:"))
    display.show(events.Prepared(generation=1, step=0, seconds=2.0, num_compilations={}, phases={}))
    display.show(committed(0))
    display.note("a line that stays")
    display.close()
    text = stream.getvalue()
    assert text.startswith("the plan\n")
    assert "1/100" in text
    assert "loss 4.2500" in text
    assert "a line that stays" in text
    assert "    [red]no markup[/] \N{REPLACEMENT CHARACTER}[2J :boom:\n" in text


def test_something_else_gets_lines(capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display(num_nodes=2, steps=100, tokens_per_step=1000, logs=NodeLogs("here"))
    display.show(committed(0))
    display.close()
    assert capsys.readouterr().out == "step 0/100  loss 4.2500  2,000 tokens/s  50 s left\n"


def test_a_plan_is_a_table() -> None:
    plan = parse_plan("0-2,2-5:5 | 0-5:3", num_microbatches=8)
    cores = {NodeId(0): (0,), NodeId(1): (1,)}
    assert plan_table(plan, names=NAMES, cores=cores).splitlines() == [
        "  pipeline  node  layers                      microbatches  cores",
        "  0         0     embedding, block 0          5             0",
        "            1     block 1-2, head                           1",
        "  1         2     embedding, block 0-2, head  3             any",
    ]


def test_a_plan_names_schedules_other_than_the_usual_one() -> None:
    plan = parse_plan("0-1@0,1-2@1,2-4@0,4-5@1", num_microbatches=8)
    assert plan_table(plan, names=NAMES, cores={}).splitlines()[1].split() == [
        "0",
        "0",
        "embedding",
        "8",
        "(interleaved)",
        "any",
    ]


def test_a_run_of_layers_is_named_by_kinds() -> None:
    assert describe_layers(range(5), NAMES) == "embedding, block 0-2, head"
    assert describe_layers(range(2, 3), NAMES) == "block 1"
    assert describe_layers(range(1, 3), ("layer 0", "layer 1", "layer 2")) == "layer 1-2"


def failed(**changes: object) -> events.Failed:
    values: dict = {
        "generation": 2,
        "step": 17,
        "node": NodeId(3),
        "cause": "the worker of node 3 failed: ValueError: boom",
        "detail": "\n".join(f"line {number}" for number in range(30)),
        "is_collateral": False,
        "is_error": True,
    }
    return events.Failed(**{**values, **changes})


def test_a_failure_is_told_with_its_place_and_its_last_lines() -> None:
    first, *rest = failure_text(failed(), "runs/a/logs/node-3.log").splitlines()
    assert first == (
        "failed: the worker of node 3 failed: ValueError: boom (generation 2, step 17, log runs/a/logs/node-3.log)"
    )
    assert rest == [f"    line {number}" for number in range(18, 30)]


def test_the_end_of_a_log_is_shown_once_in_an_incident_if_its_worker_failed_by_itself() -> None:
    logs = NodeLogs("here")
    told = Story(num_nodes=5, steps=100, tokens_per_step=1000, logs=logs)
    for node, name, log_dir in ((3, "here", "runs/a/logs"), (4, "there", "/x/logs"), (5, "there", None)):
        logs.take(events.Joined(node=NodeId(node), name=name, incarnation=0, log_dir=log_dir))
    cause = "lost: the worker of node 3 failed: ValueError: boom"
    assert told.take(failed(is_error=False)) == cause
    assert told.take(failed(is_collateral=True)) is None
    shown = told.take(failed(detail=f"{'ab' * 500}\n\x1b[31mred\rbar  \n"))
    assert (
        shown
        == f"{cause}\n  the end of its log (runs/a/logs/node-3.log):\n    {'ab' * 150} ...\n    \x1b[31mred\n    bar"
    )
    assert told.take(failed()) == cause
    for node, where in ((4, "/x/logs/node-4.log on there"), (5, "printed by its agent on there")):
        told.take(incident())
        shown = told.take(failed(node=NodeId(node)))
        assert shown is not None
        assert shown.splitlines()[1:] == [f"  the end of its log ({where}):", *(f"    line {n}" for n in range(18, 30))]


def test_several_logs_are_shown_in_an_incident_but_not_all() -> None:
    told = story()
    shown = [told.take(failed(node=NodeId(node), detail=f"words of {node}")) or "" for node in (0, 1, 1, 2, 3)]
    assert ["words of" in text for text in shown] == [True, True, False, True, False]
    told.take(incident())
    assert "words of 3" in (told.take(failed(node=NodeId(3), detail="words of 3")) or "")


def test_where_a_log_is_is_told_even_if_nothing_of_it_came_along() -> None:
    logs = NodeLogs("here")
    told = Story(num_nodes=5, steps=100, tokens_per_step=1000, logs=logs)
    cause = "lost: the worker of node 3 failed: ValueError: boom"
    assert told.take(failed(detail="")) == cause
    told.take(incident())
    logs.take(events.Joined(node=NodeId(3), name="there", incarnation=0, log_dir=None))
    assert told.take(failed(detail="")) == f"{cause}\n  its log: printed by its agent on there"


def test_durations_are_readable() -> None:
    assert [format_duration(seconds) for seconds in (0.4, 59, 60, 185, 7383)] == [
        "0 s",
        "59 s",
        "1:00",
        "3:05",
        "2:03:03",
    ]


def incident(**changes: object) -> events.Incident:
    values: dict = {
        "kind": "loss",
        "cause": "the worker of node 1 was killed by SIGKILL",
        "nodes": (NodeId(1),),
        "collateral": (),
        "generation": 2,
        "num_generations": 1,
        "step": 10,
        "seconds": {"copy": 0.1, "fabric": 0.2, "total": 0.5},
        "received_bytes": 3_100_000,
        "num_redone_microbatches": 8,
        "num_compilations": 0,
    }
    return events.Incident(**{**values, **changes})


def test_an_incident_is_told_in_one_line_with_its_costs() -> None:
    assert story().take(incident()) == (
        "loss: the worker of node 1 was killed by SIGKILL; step 10 is committed 0.50 s later (copy 0.10 s, fabric "
        "0.20 s); 3.1 MB copied, 8 microbatches redone, 0 compilations"
    )
    text = story().take(incident(num_generations=3, collateral=(NodeId(4),)))
    assert text is not None
    assert text.endswith("0 compilations, 3 attempts, nodes [4] were lost as a consequence")


def test_it_is_told_once_when_all_nodes_have_the_programs_of_later_plans() -> None:
    told = story()
    told.take(ready(0))
    told.take(ready(1))
    records = [
        events.CompiledAhead(node=NodeId(node), done=done, total=9) for node, done in ((0, 9), (1, 8), (1, 9), (0, 9))
    ]
    lines = [told.take(record) for record in records]
    assert lines == [None, None, "every node has the programs of later plans ready (9 each)", None]


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (events.Leaving(node=NodeId(1), reason="SIGTERM"), "node 1 leaves after this step (SIGTERM)"),
        (
            events.Respawned(node=NodeId(1), incarnation=2, delay_s=4.0, reason="x"),
            "node 1 gets a new worker in 4 s (number 2)",
        ),
        (events.Rejected(name="host", reason="it comes too late"), "host may not take part: it comes too late"),
        (events.Gathering(reason="no node is left"), "waiting for nodes: no node is left"),
        (
            events.Restored(generation=2, step=4, checkpoint="step-3", reason="no holder is left"),
            "goes on with step 4, from step-3 (no holder is left)",
        ),
        (
            events.Checkpointed(generation=1, step=3, folder="x", num_bytes=2_500_000, seconds={"total": 0.25}),
            "checkpoint of step 3: 2.5 MB in 0.2 s",
        ),
        (
            events.NotCheckpointed(generation=1, step=3, reason="no space left on device"),
            "WARNING: no checkpoint of step 3: no space left on device; training goes on",
        ),
        (events.Damaged(what="a checkpoint is damaged"), "WARNING: a checkpoint is damaged"),
        (
            events.Committed(generation=1, step=3, loss=None, grad_norm=None, step_time_s=1.0),
            "step 3 skipped: a gradient is not finite",
        ),
        (
            events.Evaluated(generation=1, step=3, loss=None, num_tokens=10),
            "after step 3: evaluation loss not finite over 10 tokens",
        ),
    ],
)
def test_what_happens_is_told_in_a_line(record: events.Record, line: str) -> None:
    assert story().take(record) == line


def test_a_run_that_goes_on_is_shown_from_where_it_was() -> None:
    told = story()
    assert told.take(events.Resumed(generation=3, step=40, nodes=(NodeId(0), NodeId(1)))) is not None
    assert told.step == 40
