"""Work in the background: in small parts, replaced by newer work, and without harm when it fails."""

import queue
from collections.abc import Iterator

from oobleck_jax.execution.background import Background


LIMIT_S = 10.0


def test_new_work_replaces_what_is_left_of_the_old() -> None:
    told: queue.Queue[str] = queue.Queue()
    may_go_on: queue.Queue[None] = queue.Queue()

    def endless() -> Iterator[None]:
        while True:
            told.put("old")
            may_go_on.get(timeout=LIMIT_S)
            yield

    def short() -> Iterator[None]:
        told.put("new")
        yield
        told.put("done")

    background = Background("test")
    background.begin(endless())
    assert told.get(timeout=LIMIT_S) == "old"
    background.begin(short())
    may_go_on.put(None)
    assert [told.get(timeout=LIMIT_S) for _ in range(2)] == ["new", "done"]
    background.stop()


def test_work_that_fails_is_logged_and_the_next_is_done(caplog) -> None:
    told: queue.Queue[str] = queue.Queue()

    def failing() -> Iterator[None]:
        raise OSError("the cache is full")
        yield

    background = Background("test")
    background.begin(failing())
    background.begin(told.put(text) for text in ["after"])
    assert told.get(timeout=LIMIT_S) == "after"
    assert "the cache is full" in caplog.text
