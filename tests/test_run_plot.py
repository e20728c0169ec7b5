"""The picture of a run."""

from oobleck_jax import events
from oobleck_jax.plan_text import parse_plan
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.run_plot import plot_history, read_history
from tests.test_progress import committed, incident


def test_a_run_with_incidents_is_drawn(tmp_path):
    now_s = iter(range(1000))
    files = events.RunFiles(tmp_path, clock=lambda: float(next(now_s)))
    plan = parse_plan("0-2,2-4 | 0-4", num_microbatches=4)
    files.write(events.Planned(generation=1, step=0, reason="", plan=plan, plan_reason=""))
    for step in range(20):
        files.write(committed(step))
        if step in (5, 9):
            files.write(incident(kind="loss" if step == 5 else "join", nodes=(NodeId(step),)))
    files.close()
    history = read_history(tmp_path)
    assert [record.step for _, record in history.committed] == list(range(20))
    assert [record.kind for _, record in history.incidents] == ["loss", "join"]
    assert history.working == ((0.0, 3),)
    plot_history(history, tmp_path / "run.svg", tokens_per_step=1000, title="a run")
    drawn = (tmp_path / "run.svg").read_text()
    assert "<!-- a run -->" in drawn
    assert "<!-- node 5 lost: 0.50 s -->" in drawn
    assert "<!-- node 9 joined: 0.50 s -->" in drawn
