"""Compare the pipeline trainer with plain JAX on the same model, batch and machine.

    python scripts/bench_throughput.py --json bench.json

The plain side is one process with one jit: gradient accumulation over the same microbatches, all cores. It and the runs
with 1, 2 and 4 node processes take turns; what counts is the ratio of their medians, since machines are shared.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from oobleck_jax.elastic.worker_process import MALLOC


SCRIPTS = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this benchmark."""

    preset: str = "gpt-laptop"  # what to train
    nodes: tuple[int, ...] = (1, 2, 4)  # node counts to compare with plain JAX
    rounds: int = 3  # each round measures the plain side and every node count once
    steps: int = 16  # steps of each run; the first quarter is not counted
    json: Path | None = None  # where to write the result
    plain_worker: bool = False  # internal: be the plain side, print its tokens/s


def main(arguments: Arguments) -> None:
    """Run all rounds, print and write the medians."""
    if arguments.plain_worker:
        print(json.dumps(plain_tokens_per_s(arguments.preset, arguments.steps)))
        return
    plain: list[float] = []
    pipeline: dict[int, list[dict[str, Any]]] = {count: [] for count in arguments.nodes}
    for number in range(arguments.rounds):
        plain.append(run_plain(arguments))
        print(f"round {number + 1}/{arguments.rounds}: plain {plain[-1]:.0f} tokens/s", flush=True)
        for count, summaries in pipeline.items():
            summaries.append(run_pipeline(arguments, count))
            rate = summaries[-1]["median_tokens_per_s"]
            print(f"    {count} nodes: {rate:.0f} tokens/s, {rate / plain[-1]:.2f} of plain", flush=True)
    report(arguments, plain, pipeline)


def report(arguments: Arguments, plain: list[float], pipeline: dict[int, list[dict[str, Any]]]) -> None:
    """Print the medians, and write them where `--json` says."""
    plain_rate = statistics.median(plain)
    rates = {
        count: statistics.median(summary["median_tokens_per_s"] for summary in summaries)
        for count, summaries in pipeline.items()
    }
    # Ratios within a round first: the machine's speed drifts from round to round.
    ratios = {
        count: statistics.median(
            summary["median_tokens_per_s"] / base for summary, base in zip(summaries, plain, strict=True)
        )
        for count, summaries in pipeline.items()
    }
    print(f"plain JAX: {plain_rate:.0f} tokens/s")
    for count, ratio in ratios.items():
        print(f"{count} nodes: {rates[count]:.0f} tokens/s, {ratio:.2f} of plain")
    result = {
        "preset": arguments.preset,
        "plain_tokens_per_s": plain_rate,
        "tokens_per_s": {str(count): rate for count, rate in rates.items()},
        "ratio": {str(count): ratio for count, ratio in ratios.items()},
        "seconds_of_a_step": {
            str(count): summaries[-1].get("seconds_of_a_step") for count, summaries in pipeline.items()
        },
        "peak_memory_bytes": {
            str(count): summaries[-1].get("peak_memory_bytes") for count, summaries in pipeline.items()
        },
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def run_plain(arguments: Arguments) -> float:
    """Return the tokens/s of the plain side, measured in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--plain-worker",
        "--preset",
        arguments.preset,
        "--steps",
        str(arguments.steps),
    ]
    # The same settings of malloc that workers get: they help the plain side as much.
    result = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=1200, env={**os.environ, **MALLOC}
    )
    return float(json.loads(result.stdout.splitlines()[-1]))


def run_pipeline(arguments: Arguments, nodes: int) -> dict[str, Any]:
    """Return the summary of a run with so many node processes."""
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "summary.json"
        command = [sys.executable, str(SCRIPTS / "train.py"), "--preset", arguments.preset, "--nodes", str(nodes)]
        command += ["--steps", str(arguments.steps), "--eval-every", "0", "--checkpoint-every", "0"]
        command += ["--run-dir", str(Path(folder) / "run")]
        command += ["--summary-json", str(summary)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if result.returncode:
            raise SystemExit(f"the run with {nodes} nodes failed:\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")
        return json.loads(summary.read_text())


def plain_tokens_per_s(preset: str, steps: int) -> float:
    """Train with plain JAX: one process, one jit, gradients accumulated over the microbatches by a scan."""
    import jax
    import jax.numpy as jnp
    import optax

    from models.presets import load_preset
    from oobleck_jax.data import TokenDataset
    from oobleck_jax.execution.layer_functions import LayerFunctions
    from oobleck_jax.execution.optimizer import adamw
    from oobleck_jax.learning_rate import learning_rate

    config = load_preset(preset)
    model, dataset = config.model.build(), TokenDataset.open(config)
    first, block, last = (LayerFunctions(model.layers[index]) for index in (0, 1, -1))
    seed, layer = jnp.uint32(config.seed), jnp.uint32
    blocks = [block.init(seed, layer(index))[0] for index in range(1, len(model.layers) - 1)]
    params = {
        "first": first.init(seed, layer(0))[0],
        "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks),
        "last": last.init(seed, layer(len(model.layers) - 1))[0],
        "tied": first.init(seed, layer(0))[1],
    }

    def loss(params: Any, tokens_BT: Any) -> Any:
        h = first.module(params["first"], params["tied"])(tokens_BT[:, :-1], None)
        body = jax.checkpoint(lambda h, own: (block.module(own, {})(h, None), None))
        h = jax.lax.scan(body, h, params["blocks"])[0]
        head = last.module(params["last"], params["tied"])
        return head.loss(h, tokens_BT[:, 1:], None) / config.tokens_per_step

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch_MBT: Any, rate: Any) -> Any:
        def accumulate(total: Any, tokens_BT: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, tokens_BT)), None

        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        (value, gradient), _ = jax.lax.scan(accumulate, zero, batch_MBT)
        gradient = optax.clip_by_global_norm(config.optimizer.clip_norm).update(gradient, optax.EmptyState())[0]
        updates, state = adamw(config.optimizer, rate).update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state = adamw(config.optimizer, 0.0).init(params)
    shape = (config.num_microbatches, config.microbatch_size, config.sequence_length + 1)
    times: list[float] = []
    for number in range(steps):
        began_s = time.monotonic()
        batch = dataset.tokens(dataset.sample_indices(number)).reshape(shape)
        params, state, value = step(params, state, batch, learning_rate(config, number))
        value.block_until_ready()
        times.append(time.monotonic() - began_s)
    return config.tokens_per_step / statistics.median(times[max(1, steps // 4) :])


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
