"""The learning rate as a function of the step; plain floats, so that worker and coordinator compute the same number."""

import math

from oobleck_jax.config import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine down to the final fraction at the last step.

    Warm-up ends with the peak at step `warmup_steps - 1`, so that already step 0 learns (peak / warmup_steps).
    """
    optimizer = config.optimizer
    peak = optimizer.peak_learning_rate
    if step < optimizer.warmup_steps:
        return peak * (step + 1) / optimizer.warmup_steps
    # Step warmup_steps - 1 has the peak (step 0 where there is no warm-up), step steps - 1 the final fraction of it.
    first_decayed = max(optimizer.warmup_steps - 1, 0)
    done = (step - first_decayed) / max(config.steps - 1 - first_decayed, 1)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
    floor = optimizer.final_learning_rate_fraction
    return peak * (floor + (1.0 - floor) * cosine)
