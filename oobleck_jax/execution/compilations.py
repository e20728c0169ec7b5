"""How many programs a thread has compiled, with those that JAX compiles unasked.

`Home.num_compilations` counts what we ask for. But numpy-like calls (`jnp.asarray`, `jnp.stack`, an index of an array)
compile small programs of their own, 20 ms each, and do so again whenever JAX's caches have been cleared. In a recovery
that is time lost, so it is counted where it cannot hide: at the event that JAX sends for each program.
"""

import threading

import jax


# Sent in the thread that compiles, for programs read from the persistent cache, too.
_EVENT = "/jax/core/compile/backend_compile_duration"


class _Count(threading.local):
    num_compilations: int = 0


_count = _Count()


def num_compilations() -> int:
    """Return how many programs the current thread has compiled, or read from the persistent cache, so far."""
    return _count.num_compilations


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == _EVENT:
        _count.num_compilations += 1


jax.monitoring.register_event_duration_secs_listener(_listen)
