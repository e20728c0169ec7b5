"""How many programs a thread has compiled, with those that JAX compiles unasked.

`Home.num_compilations` counts what we ask for. But numpy-like calls (`jnp.asarray`, `jnp.stack`, an index of an array)
compile small programs of their own, 20 ms each, and do so again whenever JAX's caches have been cleared. In a recovery
that is time lost, so it is counted where it cannot hide: at the event that JAX sends for each program.
"""

import threading

import jax


# Sent in the thread that compiles, for programs read from the persistent cache, too.
_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"


class _Compiled(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []
        self.num_read = 0


_compiled = _Compiled()


def num_compilations() -> int:
    """Return how many programs the current thread has compiled, or got from a cache or a store, so far."""
    return len(_compiled.names)


def compiled_since(number: int) -> tuple[str, ...]:
    """Return the names of the programs that the current thread has compiled after the first `number`."""
    return tuple(_compiled.names[number:])


def note_loaded(name: str) -> None:
    """Count a program that the current thread has loaded from a store (program_store.py)."""
    _compiled.names.append(name)


def num_read() -> int:
    """Return how many programs the current thread has read from JAX's persistent cache so far."""
    return _compiled.num_read


def _listen_to_hits(event: str, **kwargs: str | int) -> None:
    if event == _HIT:
        _compiled.num_read += 1


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == _EVENT:
        _compiled.names.append(str(kwargs.get("fun_name", "unknown")))


jax.monitoring.register_event_duration_secs_listener(_listen)
jax.monitoring.register_event_listener(_listen_to_hits)
