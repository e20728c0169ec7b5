"""Measure the layers of a model in a process of its own, as a worker would run them.

    python -m oobleck_jax.profile_process --output profile.json [--compilation-cache FOLDER] < config.json

The coordinator must not import jax, so it starts this once and reads what it wrote. What is compiled here, workers find
in the cache.
"""

import argparse
import sys
from pathlib import Path

import jax

from models.presets import config_from_json
from oobleck_jax.execution.home import Home, use_compilation_cache
from oobleck_jax.execution.profiler import measure_profile
from oobleck_jax.execution.rates import measure_rates
from oobleck_jax.planning.profile import profile_to_json


def main() -> None:
    """Measure, and write the profile."""
    parser = argparse.ArgumentParser(description="Measure the layers of the model whose configuration comes in.")
    parser.add_argument("--output", type=Path, required=True, help="where to write the profile (JSON)")
    parser.add_argument("--compilation-cache", type=Path, help="folder of compiled programs that workers share")
    parser.add_argument("--peer-core", type=int, help="where the second process of the link runs")
    arguments = parser.parse_args()
    _, config = config_from_json(sys.stdin.read())
    if arguments.compilation_cache is not None:
        arguments.compilation_cache.mkdir(parents=True, exist_ok=True)
        use_compilation_cache(arguments.compilation_cache)
    link, sum_rate = measure_rates(peer_core=arguments.peer_core)
    profile = measure_profile(
        config,
        home=Home(jax.local_devices()[: config.devices_per_node], shared_cache=arguments.compilation_cache),
        link=link,
        sum_rate=sum_rate,
        progress=_tell,
    )
    arguments.output.write_bytes(profile_to_json(profile) + b"\n")


def _tell(what: str, done: int, total: int) -> None:
    print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
