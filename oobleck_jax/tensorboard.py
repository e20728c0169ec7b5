"""Scalars for TensorBoard (`--tensorboard`), by tensorboardX, which is small and needs neither TensorFlow nor torch."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from oobleck_jax import events
from oobleck_jax.errors import ConfigError


def check_tensorboard() -> None:
    """Refuse `--tensorboard` where it cannot be.

    Raises:
        ConfigError: tensorboardX is not installed.
    """
    if find_spec("tensorboardX") is None:
        raise ConfigError("--tensorboard needs tensorboardX; install it: pip install 'oobleck-jax[tensorboard]'")


class Scalars:
    """Writes a run's scalars; steps are the run's."""

    def __init__(
        self, folder: Path, *, tokens_per_step: int, learning_rate: Callable[[int], float], first_step: int
    ) -> None:
        """Begin a file.

        Args:
            folder: of the files; those that are there are kept.
            tokens_per_step: of the global batch.
            learning_rate: of a step.
            first_step: what an earlier file says of it and later steps does not count.
        """
        from tensorboardX import SummaryWriter  # an extra that not everybody has

        self._tokens_per_step, self._learning_rate = tokens_per_step, learning_rate
        self._step = first_step
        self._writer = SummaryWriter(logdir=str(folder), purge_step=first_step or None, flush_secs=5)

    def take(self, record: events.Record) -> None:
        """Write what a record has to say."""
        match record:
            case events.Committed():
                self._step = record.step
                self._write("train/loss", record.loss)
                self._write("train/grad_norm", record.grad_norm)
                self._write("train/learning_rate", self._learning_rate(record.step))
                self._write("speed/step_seconds", record.step_time_s)
                self._write("speed/tokens_per_second", self._tokens_per_step / max(record.step_time_s, 1e-9))
            case events.Evaluated() if record.loss is not None:
                self._write("evaluation/loss", record.loss)
            case events.Planned():
                self._write("cluster/generation", record.generation)
                self._write("cluster/working_nodes", len({n for it in record.plan.pipelines for n in it.nodes}))
            case events.Incident():
                self._write(f"incidents/{record.kind}_seconds", record.seconds.get("total", 0.0))
            case _:
                pass

    def close(self) -> None:
        self._writer.close()

    def _write(self, name: str, value: float | None) -> None:
        if value is not None:  # the loss and the norm of a step that was skipped are not finite
            self._writer.add_scalar(name, value, self._step)
