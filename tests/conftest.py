"""Settings of all tests: eight virtual CPU devices, annotated shapes checked, and the same examples every time.

Nothing of ours may be imported here, or it would be too early for the import hook.
"""

import os

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook


# Compiling costs far more than running these small programs, and a third as much without the optimizations of LLVM.
# Processes that tests start inherit this.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

install_import_hook("models.layers", "beartype.beartype")

hypothesis.settings.register_profile("dev", derandomize=True, database=None, deadline=None, max_examples=25)
hypothesis.settings.register_profile("ci", derandomize=True, database=None, deadline=None, max_examples=100)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with whole runs, which take longest, so that all processes of pytest-xdist end at about the same time."""
    items.sort(key=lambda item: "end_to_end" not in item.path.parts)
