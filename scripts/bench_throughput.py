"""Compare the pipeline trainer with plain JAX on the same model, batch and machine.

    python scripts/bench_throughput.py --json bench.json
    python scripts/bench_throughput.py --cases gpt-laptop:float32 wide:mixed --nodes 1 2 4

The plain side is one process with one jit: gradient accumulation over the same microbatches, with the same precision
and the same rematerialisation, on all cores. It and the runs
with 1, 2 and 4 node processes take turns; what counts is the ratio of their medians, since machines are shared.

A case is a preset and a precision; "wide" is a model of this script: 45 million parameters, most of them in the
embedding of 50,257 tokens, so that the loss and the sums of gradients count for more.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from models.gpt import GptConfig
from models.presets import load_preset
from oobleck_jax.config import OptimizerConfig, Precision, RunConfig
from oobleck_jax.elastic.worker_process import MALLOC
from oobleck_jax.script import make_room, run_script


SCRIPTS = Path(__file__).parent
WIDE = "wide"


def wide() -> RunConfig:
    """Six blocks of width 512 over the vocabulary of GPT-2."""
    return RunConfig(
        model=GptConfig(num_blocks=6, width=512, num_heads=8, vocab_size=50257, context_length=128),
        optimizer=OptimizerConfig(peak_learning_rate=3e-4, warmup_steps=10),
        steps=100,
        global_batch_size=16,
        microbatch_size=2,
        sequence_length=128,
    )


class Case(NamedTuple):
    """What to train, and in which precision."""

    preset: str
    precision: Precision

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Read PRESET:PRECISION."""
        preset, _, precision = text.rpartition(":")
        try:
            case = cls(f"{__file__}:{WIDE}" if preset == WIDE else preset, Precision(precision))
        except ValueError:
            raise SystemExit(f"--cases: {text!r} is not PRESET:{'|'.join(Precision)}") from None
        load_preset(case.preset)  # refuse what is none
        return case


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this benchmark."""

    cases: tuple[str, ...] = ("gpt-laptop:float32",)  # PRESET:PRECISION; see above
    nodes: tuple[int, ...] = (1, 2, 4)  # node counts to compare with plain JAX
    rounds: int = 3  # each round measures the plain side and every node count once
    steps: int = 16  # steps of each run; the first quarter is not counted
    json: Path | None = None  # where to write the result
    plain_worker: bool = False  # internal: be the plain side of the only case, print its tokens/s


def main(arguments: Arguments) -> None:
    """Run all rounds of each case, print and write the medians."""
    make_room(arguments.json, flag="--json")
    cases = {text: Case.parse(text) for text in arguments.cases}
    if arguments.plain_worker:
        (case,) = cases.values()
        print(json.dumps(plain_tokens_per_s(case, arguments.steps)))
        return
    results = {text: compare(arguments, text, case) for text, case in cases.items()}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def compare(arguments: Arguments, text: str, case: Case) -> dict[str, Any]:
    """Run all rounds of a case; return and print the medians."""
    plain: list[float] = []
    pipeline: dict[int, list[dict[str, Any]]] = {count: [] for count in arguments.nodes}
    for number in range(arguments.rounds):
        plain.append(run_plain(text, arguments.steps))
        print(f"{text}, round {number + 1}/{arguments.rounds}: plain {plain[-1]:.0f} tokens/s", flush=True)
        for count, summaries in pipeline.items():
            summaries.append(run_pipeline(case, count, arguments.steps))
            rate = summaries[-1]["median_tokens_per_s"]
            print(f"    {count} nodes: {rate:.0f} tokens/s, {rate / plain[-1]:.2f} of plain", flush=True)
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
    print(f"{text}: plain JAX {statistics.median(plain):.0f} tokens/s")
    for count, ratio in ratios.items():
        print(f"{text}: {count} nodes {rates[count]:.0f} tokens/s, {ratio:.2f} of plain")
    return {
        "plain_tokens_per_s": statistics.median(plain),
        "tokens_per_s": {str(count): rate for count, rate in rates.items()},
        "ratio": {str(count): ratio for count, ratio in ratios.items()},
        "seconds_of_a_step": {
            str(count): summaries[-1].get("seconds_of_a_step") for count, summaries in pipeline.items()
        },
        "peak_memory_bytes": {
            str(count): summaries[-1].get("peak_memory_bytes") for count, summaries in pipeline.items()
        },
    }


def run_plain(text: str, steps: int) -> float:
    """Return the tokens/s of the plain side, measured in a process of its own."""
    command = [sys.executable, __file__, "--plain-worker", "--cases", text, "--steps", str(steps)]
    # The same settings of malloc that workers get: they help the plain side as much.
    result = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=1200, env={**os.environ, **MALLOC}
    )
    return float(json.loads(result.stdout.splitlines()[-1]))


def run_pipeline(case: Case, nodes: int, steps: int) -> dict[str, Any]:
    """Return the summary of a run with so many node processes."""
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "summary.json"
        command = [sys.executable, str(SCRIPTS / "train.py"), "--preset", case.preset, "--nodes", str(nodes)]
        command += ["--precision", case.precision, "--steps", str(steps)]
        command += ["--eval-every", "0", "--checkpoint-every", "0"]
        command += ["--run-dir", str(Path(folder) / "run")]
        command += ["--summary-json", str(summary)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if result.returncode:
            raise SystemExit(f"the run with {nodes} nodes failed:\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")
        return json.loads(summary.read_text())


def plain_tokens_per_s(case: Case, steps: int) -> float:
    """Train with plain JAX: one process, one jit, gradients accumulated over the microbatches by a scan.

    In mixed precision the parameters are rounded once per step, and gradients are accumulated in float32.
    """
    import jax
    import jax.numpy as jnp
    import optax

    from oobleck_jax.data import TokenDataset
    from oobleck_jax.execution.layer_functions import LayerFunctions
    from oobleck_jax.execution.optimizer import adamw
    from oobleck_jax.execution.precision import as_computed
    from oobleck_jax.execution.span import rematerialised
    from oobleck_jax.learning_rate import learning_rate

    config = replace(load_preset(case.preset), precision=case.precision)
    model, dataset = config.model.build(), TokenDataset.open(config)
    first, block, last = (LayerFunctions(model.layers[index], case.precision) for index in (0, 1, -1))
    seed, layer = jnp.uint32(config.seed), jnp.uint32
    blocks = [block.init(seed, layer(index))[0] for index in range(1, len(model.layers) - 1)]
    params = {
        "first": first.init(seed, layer(0))[0],
        "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks),
        "last": last.init(seed, layer(len(model.layers) - 1))[0],
        "tied": first.init(seed, layer(0))[1],
    }

    def loss(params: Any, tokens_BT: Any) -> Any:
        h = first.apply(params["first"], params["tied"], tokens_BT[:, :-1], None)
        body = rematerialised(lambda h, own: (block.apply(own, {}, h, None), None), config.remat)
        h = jax.lax.scan(body, h, params["blocks"])[0]
        head = last.module(params["last"], params["tied"])
        return head.loss(h, tokens_BT[:, 1:], None) / config.tokens_per_step

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch_MBT: Any, rate: Any) -> Any:
        computed = as_computed(params, case.precision)

        def accumulate(total: Any, tokens_BT: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(computed, tokens_BT)), None

        zero = (jnp.float32(0), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params))
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
    sys.exit(run_script(main, tyro.cli(Arguments, description=__doc__)))
