"""Failures on purpose: what `--inject` takes, and that a worker carries it out."""

import subprocess
import sys

import pytest

from oobleck_jax.errors import ConfigError
from oobleck_jax.inject import Injection, Kind, Moment, WorkerInjector, check_injections, parse_injections
from oobleck_jax.planning.plan import NodeId


TEXT = "kill:2@10:backward,raise:0@4:vote,stop:0@3:forward,term:1@4:sum,slow:1@5:0.5,join@20,coordinator@30"


def test_every_kind_is_parsed_and_printed_the_same():
    injections = parse_injections(TEXT)
    assert [injection.kind for injection in injections] == list(dict.fromkeys(i.kind for i in injections))
    assert set(Kind) == {injection.kind for injection in injections}
    assert ",".join(map(str, injections)) == TEXT


def test_the_default_moment_is_forward():
    assert parse_injections("kill:2@10") == (Injection(kind=Kind.KILL, node=NodeId(2), step=10),)
    assert parse_injections("kill:2@10")[0].moment is Moment.FORWARD


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("explode:1@2", "give kill:NODE@STEP"),
        ("kill:1", r"slow:NODE@STEP\[:SECONDS\], join@STEP or coordinator@STEP"),
        ("kill:1@2:lunch", "lunch is no moment; choose from forward"),
        ("slow:1@2:much", "much is no number of seconds"),
        ("join:1@2", "give kill:NODE@STEP"),
    ],
)
def test_what_cannot_be_parsed_is_refused_with_the_way_out(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_injections(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill:4@1", "the run has nodes 0 to 3"),
        ("kill:1@60", "the run has steps 0 to 59"),
        ("join@3", "needs all nodes on this machine"),
    ],
)
def test_what_can_never_happen_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        check_injections(parse_injections(text), num_nodes=4, steps=60, is_local=False)
    check_injections(parse_injections("kill:3@59,join@3"), num_nodes=4, steps=60, is_local=True)


def test_a_worker_dies_at_its_moment_and_no_sooner():
    code = """
from oobleck_jax.inject import Moment, WorkerInjector
injector = WorkerInjector(["kill:2@1:vote"])
for step in range(3):
    for moment in (Moment.FORWARD, Moment.BACKWARD, Moment.SUM, Moment.VOTE, Moment.COMMIT):
        injector(moment, step)
        print(step, moment, flush=True)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == -9
    assert result.stdout.splitlines()[-1] == "1 sum"


def test_the_next_incarnation_does_not_die_of_the_same():
    second = WorkerInjector(["kill:2@1:vote", "raise:2@3:vote"], incarnation=1)
    second(Moment.VOTE, 1)  # the test itself would die
    with pytest.raises(RuntimeError, match="an error on purpose \\(--inject raise:2@3:vote\\)"):
        second(Moment.VOTE, 3)
