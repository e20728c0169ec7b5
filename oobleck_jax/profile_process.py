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
from dataclasses import replace
from pathlib import Path

from models.presets import config_from_json
from oobleck_jax.elastic.child import child_command
from oobleck_jax.elastic.messages import RunId
from oobleck_jax.execution.home import home_of, use_compilation_cache
from oobleck_jax.execution.profiler import measure_profile
from oobleck_jax.execution.rates import measure_rates
from oobleck_jax.launch import available_cores
from oobleck_jax.planning.plan import MAX_SPAN_LAYERS
from oobleck_jax.planning.profile import Profile, Rate, profile_to_json
from oobleck_jax.program_origin import store_of


_ANY = Rate(bytes_per_s=1.0, latency_s=0.0)


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

    def measure(progress: Callable[[str, int, int], None]) -> Profile:
        return measure_profile(config, home=home, link=_ANY, sum_rate=_ANY, progress=progress)

    if arguments.output is None:
        while True:
            measure(lambda what, done, total: None)
    with _neighbour(arguments.peer_core, arguments.compilation_cache, text):
        profile = measure(_tell)
    link, sum_rate = measure_rates(program_s=_program_s(profile), peer_core=arguments.peer_core)
    arguments.output.write_bytes(profile_to_json(replace(profile, link=link, sum=sum_rate)) + b"\n")


def _program_s(profile: Profile) -> float:
    """Return what a forward or backward program usually takes, of the kind of layer that takes most of a step."""
    times_s: dict[str, list[float]] = {}
    for layer in profile.layers:
        times_s.setdefault(layer.kind, []).append(layer.costs[0].forward_s + layer.costs[0].backward_s)
    longest = max(times_s.values(), key=sum)
    return sum(longest[:MAX_SPAN_LAYERS]) / 2


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
