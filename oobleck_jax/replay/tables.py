"""What policies made of a trace, as tables for a terminal."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from oobleck_jax.replay.score import Contest, Score
from oobleck_jax.replay.timeline import Spending


HEADERS = {
    Spending.USEFUL: "useful",
    Spending.REDONE: "redone",
    Spending.RECOVERY: "recov.",
    Spending.CHECKPOINT: "ckpt.",
    Spending.REDUNDANT: "redun.",
    Spending.IDLE: "idle",
}


def scores_table(contest: Contest) -> Table:
    """Return a row for each policy, the best first: what it reached, and the parts of the time it spent on what."""
    trace = contest.trace
    table = Table(
        title=f"{contest.workload.name} on {trace.name}: {trace.duration_s / 3600:.3g} h, up to {trace.most_nodes} "
        f"nodes ({trace.mean_nodes:.3g} on the mean), {trace.num_losses} losses",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0),
    )
    table.add_column("policy", no_wrap=True)
    for name in ("samples/s", "oracle", *HEADERS.values()):
        table.add_column(name, justify="right", no_wrap=True)
    for name, score in _in_order(contest):
        spent = [f"{score.breakdown[spending] / trace.duration_s:.1%}" for spending in Spending]
        reached = [f"{score.samples_per_s:.4g}", f"{score.share_of_oracle:.1%}", *spent]
        table.add_row(name, *(["-"] * len(reached) if score.note else reached))
    return table


def settings_table(contest: Contest) -> Table:
    """Return the setting of each policy, or why it cannot run."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    table.add_column("losses survived", justify="right", no_wrap=True)
    table.add_column("setting")
    for name, score in _in_order(contest):
        table.add_row(name, "-" if score.note else str(score.losses_survived), score.note or score.variant)
    return table


def _in_order(contest: Contest) -> list[tuple[str, Score]]:
    return sorted(contest.scores.items(), key=lambda item: -item[1].samples)


def sweep_table(name: str, values: list[str], scores: list[dict[str, Score]]) -> Table:
    """Return a row for each value of what is swept, and the share of the oracle of each policy."""
    table = Table(title=f"share of the oracle by {name}", title_justify="left")
    table.add_column(name, justify="right")
    for policy in scores[0]:
        table.add_column(policy, justify="right")
    for value, row in zip(values, scores, strict=True):
        table.add_row(value, *("-" if score.note else f"{score.share_of_oracle:.1%}" for score in row.values()))
    return table
