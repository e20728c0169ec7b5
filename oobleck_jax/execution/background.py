"""A thread for what can wait: it works in small parts, and drops what is left when it is given more.

It has the priority of the others: one with a lower priority could be kept waiting on a busy core while it holds
Python's lock, and then everybody would wait.
"""

import logging
import queue
import threading
from collections.abc import Iterable


logger = logging.getLogger(__name__)


class Background:
    """Does one piece of work at a time, beside everything else. It never keeps the process from ending."""

    def __init__(self, name: str) -> None:
        self._given: queue.SimpleQueue[Iterable[None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def begin(self, parts: Iterable[None]) -> None:
        """Work through an iterator, in place of what is left of the one before; that ends after its current part."""
        self._given.put(parts)

    def stop(self) -> None:
        """Drop what is left to do. Returns at once; the current part still ends."""
        self._given.put(())

    def _run(self) -> None:
        while True:
            parts = self._given.get()
            try:
                for _ in parts:
                    if not self._given.empty():
                        break
            except Exception:
                logger.exception("work in the background failed; training goes on without it")
            del parts
