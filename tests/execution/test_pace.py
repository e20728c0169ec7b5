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

    def __init__(self, took_s: float) -> None:
        self._ready_s = time.monotonic() + took_s

    def is_ready(self) -> bool:
        return time.monotonic() >= self._ready_s

    def is_deleted(self) -> bool:
        return False


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
