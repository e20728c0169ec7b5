"""Programs are counted, and named, for the thread that compiles them, also those that nobody asked for."""

import threading

import jax
import jax.numpy as jnp
import numpy as np

from oobleck_jax.execution.compilations import compiled_since, num_compilations


def test_programs_that_jax_compiles_unasked_are_counted_and_named() -> None:
    def doubled(x: jax.Array) -> jax.Array:
        return 2 * x

    x = jax.device_put(np.ones(7, np.float32))
    before = num_compilations()
    program = jax.jit(doubled)
    program(x)
    program(x)
    assert num_compilations() - before == 1
    jnp.stack([x] * 11)  # a shape that nothing else has
    names = compiled_since(before)
    assert "doubled" in names[0]
    assert len(names) > 1


def test_each_thread_has_its_own_count() -> None:
    before = num_compilations()
    x = np.ones(13, np.float32)
    thread = threading.Thread(target=lambda: jax.jit(lambda x: x + 13)(x))
    thread.start()
    thread.join()
    assert num_compilations() == before
