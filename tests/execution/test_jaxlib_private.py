"""What is private to jax and jaxlib does what the package needs, with the jax that is installed."""

import socket
import subprocess
import sys
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oobleck_jax.errors import UnsupportedJax
from oobleck_jax.execution import jaxlib_private
from oobleck_jax.execution.jaxlib_private import restore_residuals, strip_residuals


pytestmark = pytest.mark.jax_version

L, B, D = 4, 8, 16  # layers, batch, width


def block(layer: dict[str, jax.Array], x_BD: jax.Array) -> jax.Array:
    return x_BD + jnp.tanh(x_BD @ layer["w"] + layer["b"]) @ layer["v"]


@pytest.fixture
def parameters() -> dict[str, jax.Array]:
    w, v, b = jax.random.split(jax.random.key(0), 3)
    return {
        "w": jax.random.normal(w, (L, D, D)) / D,
        "v": jax.random.normal(v, (L, D, D)) / D,
        "b": jax.random.normal(b, (L, D)) / D,
    }


@pytest.mark.parametrize("remat", [False, True])
def test_stripped_residuals_give_exact_gradients_and_carry_no_parameters(
    parameters: dict[str, jax.Array], remat: bool
) -> None:
    one = jax.checkpoint(block) if remat else block
    x_BD = jax.random.normal(jax.random.key(1), (B, D))
    dy_BD = jax.random.normal(jax.random.key(2), (B, D))

    def apply(parameters: dict[str, jax.Array], x_BD: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x_BD, layer: (one(layer, x_BD), None), x_BD, parameters)[0]

    @jax.jit
    def forward(parameters: dict[str, jax.Array], x_BD: jax.Array) -> tuple[jax.Array, Any]:
        y_BD, vjp = jax.vjp(apply, parameters, x_BD)
        return y_BD, strip_residuals(vjp)

    @jax.jit
    def backward(residuals: Any, parameters: dict[str, jax.Array], x_BD: jax.Array, dy_BD: jax.Array) -> Any:
        return restore_residuals(residuals, (parameters, x_BD))(dy_BD)

    y_BD, residuals = forward(parameters, x_BD)
    expected = jax.grad(lambda parameters, x_BD: (apply(parameters, x_BD) * dy_BD).sum(), (0, 1))(parameters, x_BD)
    jax.tree.map(np.testing.assert_array_equal, backward(residuals, parameters, x_BD, dy_BD), expected)
    np.testing.assert_array_equal(y_BD, apply(parameters, x_BD))
    kept = jax.tree.leaves(residuals)
    assert all(array.shape[-2:] == (B, D) for array in kept), [array.shape for array in kept]
    assert len(kept) == (1 if remat else 3)


def test_the_wrong_number_of_primals_is_refused() -> None:
    _, vjp = jax.vjp(lambda x: jnp.sin(x), 1.0)
    with pytest.raises(AssertionError, match="1 primals, 2 are given"):
        restore_residuals(strip_residuals(vjp), (1.0, 2.0))


def test_a_coordination_service_costs_no_jax() -> None:
    code = (
        "import sys; from oobleck_jax.execution.jaxlib_private import start_coordination_service;"
        "service = start_coordination_service('127.0.0.1:0', 1); service.close(); service.close();"
        "assert 'jax' not in sys.modules, 'jax was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_a_taken_port_is_an_error_and_a_free_one_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        jaxlib_private.start_coordination_service(f"127.0.0.1:{taken.getsockname()[1]}", 1)
    service = jaxlib_private.start_coordination_service("127.0.0.1:0", 1)
    try:
        client = jaxlib_private.CoordinationClient(service.address, 0)
        client.connect()
        client.shutdown()
    finally:
        service.close()


def test_what_is_missing_is_named_with_the_version_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import jaxlib._jax

    monkeypatch.delattr(jaxlib._jax, "get_distributed_runtime_service")
    with pytest.raises(
        UnsupportedJax,
        match=r"jaxlib \d+\.\d+.* has no `jaxlib._jax.get_distributed.*`, which this package needs; install",
    ):
        jaxlib_private.start_coordination_service("127.0.0.1:0", 1)


def test_an_old_jaxlib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("jaxlib.version")
    old.__version__ = "0.9.2"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxlib.version", old)
    with pytest.raises(UnsupportedJax, match=r"0\.9\.2 is too old; install jax>=0\.10"):
        jaxlib_private.check_versions()
