"""What is known of a run from its configuration, before it begins."""

from functools import partial
from pathlib import Path

from models.gpt import GptConfig
from oobleck_jax.config import Precision, RunConfig
from oobleck_jax.dashboard.run_state import RunFacts
from oobleck_jax.planning.devices import device_of_kind
from oobleck_jax.propose import estimated_profile, layer_names, layer_sizes


_BACKWARD_AND_FORWARD = 3  # times the operations of the forward pass alone; recomputation does not count


def facts_of(
    preset: str, config: RunConfig, run_dir: Path, *, smallest_num_nodes: int = 1, has_actions: bool = False
) -> RunFacts:
    """Return the facts of a run.

    Args:
        preset: reference of the configuration's preset.
        config: of the run.
        run_dir: where its files are.
        smallest_num_nodes: with which there is a plan.
        has_actions: there is a token, so that who has it may act.
    """
    return RunFacts(
        preset=preset,
        run_dir=str(run_dir.resolve()),
        steps=config.steps,
        tokens_per_step=config.tokens_per_step,
        fault_tolerance=config.fault_tolerance,
        layer_names=layer_names(estimated_profile(config)),
        smallest_num_nodes=smallest_num_nodes,
        flops_per_step=flops_per_step(config),
        peak_flops_per_s=partial(peak_flops_per_s, precision=config.precision),
        has_actions=has_actions,
    )


def flops_per_step(config: RunConfig) -> float | None:
    """Return the operations of forward and backward of a step, nothing recomputed; None: only known of GPTs."""
    if not isinstance(config.model, GptConfig):
        return None
    forward_flops = sum(size.forward_flops for size in layer_sizes(config))
    return float(_BACKWARD_AND_FORWARD * forward_flops * config.global_batch_size)


def peak_flops_per_s(kind: str, precision: Precision = Precision.FLOAT32) -> float | None:
    """Return the peak rate of a device that JAX calls by this name; None: it is not known."""
    device = device_of_kind(kind)
    return None if device is None else device.peak_flops_per_s(precision)
