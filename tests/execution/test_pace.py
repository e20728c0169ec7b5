"""The pace of a step: little is queued, waits end with the step, and results that are donated do not disturb."""

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from oobleck_jax.errors import Abandoned
from oobleck_jax.execution.pace import Pace


class Result:
    """An array of a program that takes some time."""

    def __init__(self, took_s: float, given: "Result | None" = None) -> None:
        self._given_away = False
        self._ready_s = time.monotonic() + took_s
        if given is not None:
            self._ready_s = max(self._ready_s, given._ready_s + took_s)
            given._given_away = True

    def is_ready(self) -> bool:
        assert not self._given_away, "jax raises an error"
        return time.monotonic() >= self._ready_s

    def is_deleted(self) -> bool:
        return self._given_away


def test_long_programs_wait_for_each_other_and_short_ones_do_not() -> None:
    pace = Pace()
    pace.begin(threading.Event())
    for name, took_s in (("long", 0.2), ("short", 0.001)):
        pace.run(name, Result, took_s)  # the first time it is not known
        pace.finish()
    began_s = time.monotonic()
    for _ in range(3):
        pace.run("short", Result, 0.001)
    assert time.monotonic() - began_s < 0.1
    pace.finish()
    pace.run("long", Result, 0.2)
    began_s = time.monotonic()
    pace.run("short", Result, 0.001)
    assert time.monotonic() - began_s > 0.1
    pace.finish()


def test_a_wait_ends_with_its_step() -> None:
    pace, abandoned = Pace(), threading.Event()
    pace.begin(abandoned)
    pace.run("endless", Result, 1e6)
    threading.Timer(0.05, abandoned.set).start()
    with pytest.raises(Abandoned):
        pace.run("next", Result, 0.0)
    pace.begin(threading.Event())
    pace.finish()


def test_donated_results_count_as_over() -> None:
    pace = Pace()
    pace.begin(threading.Event())
    add = jax.jit(lambda x: x + 1, donate_argnums=0).lower(jnp.zeros(8)).compile()
    x = jnp.zeros(8)
    for _ in range(4):
        x = pace.run("add", add, x)
    pace.finish()
    assert float(x[0]) == 4


def test_a_program_has_not_ended_because_the_next_one_was_given_its_result() -> None:
    pace = Pace()
    pace.begin(threading.Event())
    for _ in range(2):  # the second time it is known what they take
        began_s = time.monotonic()
        acc = pace.run("backward", Result, 0.05)
        for _ in range(4):
            acc = pace.run("backward", Result, 0.05, acc)
        assert time.monotonic() - began_s > 0.15  # of 0.25 s that they take, one may be about to end
        pace.finish()
        assert acc.is_ready()


def test_programs_that_ended_unseen_share_the_time() -> None:
    ended: dict[str, float] = {}
    pace = Pace(on_ended=lambda program, item, began_s, ended_s: ended.update({str(program): ended_s - began_s}))
    pace.begin(threading.Event())
    took_s = {"short": 0.002, "long": 0.008}
    for name, seconds in 5 * list(took_s.items()):  # the first time it is looked at every 10 ms
        pace.run(name, Result, seconds)
        pace.finish()
    result = None
    for name, seconds in took_s.items():
        result = pace.run(name, Result, seconds, result)
    time.sleep(0.1)
    pace.finish()
    assert ended["short"] + ended["long"] > 0.1
    assert 0.1 < ended["short"] / ended["long"] < 0.7  # neither has all of it, as the last one of them would


def test_programs_are_seen_to_end_while_something_else_is_waited_for() -> None:
    ended: list[tuple[str, int, float, float]] = []
    pace = Pace(on_ended=lambda program, item, began_s, ended_s: ended.append((str(program), item, began_s, ended_s)))
    pace.begin(threading.Event())
    began_s = time.monotonic()
    for item in (3, 4):
        pace.item = item
        pace.run("program", Result, 0.01)
    is_here = threading.Event()
    pace.watch(until=is_here.is_set)  # ends with the programs
    assert [(program, item) for program, item, _, _ in ended] == [("program", 3), ("program", 4)]
    assert began_s <= ended[0][2] < ended[0][3] <= ended[1][2] <= ended[1][3]  # one after the other
    pace.item = 5
    pace.run("program", Result, 1e6)
    is_here.set()
    pace.watch(until=is_here.is_set)  # ends with what is waited for
    assert len(ended) == 2


def test_watching_ends_with_the_step() -> None:
    pace, abandoned = Pace(), threading.Event()
    pace.begin(abandoned)
    pace.run("endless", Result, 1e6)
    abandoned.set()
    with pytest.raises(Abandoned):
        pace.watch(until=lambda: False)
