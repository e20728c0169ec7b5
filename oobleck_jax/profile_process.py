"""Measure the layers of a model in a process of its own, as a worker would run them.

    python -m oobleck_jax.profile_process --output profile.json [--compilation-cache FOLDER] < config.json

The coordinator must not import jax, so it starts this once and reads what it wrote. What is compiled here, workers find
in the cache.

Where nodes share a machine, a neighbour does the same on another core meanwhile: busy cores slow each other down, and
in a run they all are busy.
"""

import argparse
import contextlib
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from models.presets import config_from_json
from oobleck_jax.elastic.child import child_command
from oobleck_jax.elastic.messages import RunId
from oobleck_jax.execution.home import home_of, use_compilation_cache
from oobleck_jax.execution.profiler import measure_profile
from oobleck_jax.execution.rates import measure_rates
from oobleck_jax.launch import available_cores
from oobleck_jax.planning.profile import Profile, Rate, profile_to_json
from oobleck_jax.program_origin import store_of


def main() -> None:
    """Measure, and write the profile."""
    parser = argparse.ArgumentParser(description="Measure the layers of the model whose configuration comes in.")
    parser.add_argument("--output", type=Path, help="where to write the profile (JSON); without: measure without end")
    parser.add_argument("--compilation-cache", type=Path, help="folder of compiled programs that workers share")
    parser.add_argument("--peer-core", type=int, help="of another node")
    arguments = parser.parse_args()
    text = sys.stdin.read()
    preset, config = config_from_json(text)
    if arguments.compilation_cache is not None:
        arguments.compilation_cache.mkdir(parents=True, exist_ok=True)
        use_compilation_cache(arguments.compilation_cache)
    store = store_of(preset, config, arguments.compilation_cache, run_id=RunId(secrets.token_hex(8)))
    home = home_of(config, config.model.build(), store)

    def measure(link: Rate, sum_rate: Rate, progress: Callable[[str, int, int], None]) -> Profile:
        return measure_profile(config, home=home, link=link, sum_rate=sum_rate, progress=progress)

    if arguments.output is None:
        anything = Rate(bytes_per_s=1.0, latency_s=0.0)
        while True:
            measure(anything, anything, lambda what, done, total: None)
    link, sum_rate = measure_rates(peer_core=arguments.peer_core)
    with _neighbour(arguments.peer_core, arguments.compilation_cache, text):
        profile = measure(link, sum_rate, _tell)
    arguments.output.write_bytes(profile_to_json(profile) + b"\n")


@contextlib.contextmanager
def _neighbour(core: int | None, cache: Path | None, config: str) -> Iterator[None]:
    """Keep another core as busy as this one, if nodes have a core each."""
    if core is None or core in available_cores():
        yield
        return
    command = [sys.executable, "-m", __spec__.name]
    if cache is not None:
        command += ["--compilation-cache", str(cache)]
    with subprocess.Popen(
        child_command(command, cores=(core,)),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as neighbour:
        assert neighbour.stdin is not None
        try:
            neighbour.stdin.write(config)
            neighbour.stdin.close()
            yield
        finally:
            neighbour.kill()


def _tell(what: str, done: int, total: int) -> None:
    print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
