"""Settings of all tests: eight virtual CPU devices, annotated shapes checked, and the same examples every time.

Nothing of ours may be imported here, or it would be too early for the import hook.
"""

import os
from pathlib import Path

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook


# Compiling costs far more than running these small programs; without the optimizations of LLVM, and with the older
# generator of code, which jax 0.12 has no more, it takes a sixth as long. Processes that tests start inherit this.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 12):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of hundreds of processes compiles our modules anew
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# What one process of pytest-xdist has compiled serves the others, and the next run.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".pytest_cache" / "programs"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

install_import_hook("models.layers", "beartype.beartype")

hypothesis.settings.register_profile("dev", derandomize=True, database=None, deadline=None, max_examples=25)
hypothesis.settings.register_profile("ci", derandomize=True, database=None, deadline=None, max_examples=100)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with whole runs, go on with other processes and much that is compiled, and end with what takes no time.

    So all processes of pytest-xdist end at about the same time.
    """
    long = {item.path for item in items if item.get_closest_marker("process") or "execution" in item.path.parts}
    items.sort(key=lambda item: ("end_to_end" not in item.path.parts, item.path not in long))
