"""The summary of a run, as it is built up from its records."""

import statistics
from typing import Any

from oobleck_jax import events
from oobleck_jax.elastic.effects import Finish
from oobleck_jax.memory import peak_memory_bytes


class Summary:
    """What a run amounts to in the end; JSON by `to_dict`."""

    def __init__(self, *, tokens_per_step: int) -> None:
        self.failure: events.Failed | None = None  # the first cause, if the run failed
        self._tokens_per_step = tokens_per_step
        self._steps = 0
        self._loss: float | None = None
        self._num_skipped = 0
        self._eval_loss: float | None = None
        self._step_times_s: list[float] = []
        self._step_seconds: list[dict[str, float]] = []
        self._generations = 0
        self._num_compilations: dict[int, int] = {}
        self._workers: dict[int, int] = {}
        self._agents: dict[int, int] = {}

    def take(self, record: events.Record) -> None:
        match record:
            case events.Planned():
                self._generations = record.generation
            case events.Prepared():
                self._num_compilations.update(record.num_compilations)
            case events.Committed():
                self._steps = record.step + 1
                self._loss = self._loss if record.loss is None else record.loss
                self._num_skipped += record.grad_norm is None
                self._step_times_s.append(record.step_time_s)
                self._step_seconds.append(record.seconds)
            case events.Evaluated():
                self._eval_loss = record.loss
            case events.Failed() if not record.is_collateral and self.failure is None:
                self.failure = record
            case events.Left():
                self._workers[record.node] = max(self._workers.get(record.node, 0), record.peak_memory_bytes)
                self._agents[record.node] = record.agent_peak_memory_bytes
            case _:
                pass

    def to_dict(self, end: Finish, *, seconds: float, start_up_s: float | None) -> dict[str, Any]:
        """Return the summary.

        Args:
            end: how the run ended.
            seconds: from the start of the program to its end.
            start_up_s: from the start of the program to the first step.
        """
        # The first step still warms caches up.
        times_s = self._step_times_s[1:] or self._step_times_s
        step_time_s = statistics.median(times_s) if times_s else None
        return {
            "steps": self._steps,
            "final_loss": self._loss,
            "skipped_steps": self._num_skipped,
            "eval_loss": self._eval_loss,
            "median_tokens_per_s": self._tokens_per_step / step_time_s if step_time_s else None,
            "median_step_time_s": step_time_s,
            "seconds_of_a_step": {
                name: statistics.median(seconds.get(name, 0.0) for seconds in self._step_seconds)
                for name in sorted({name for seconds in self._step_seconds for name in seconds})
            },
            "seconds": seconds,
            "start_up_s": start_up_s,
            "generations": self._generations,
            "exit_code": end.exit_code,
            "reason": end.reason,
            "failed_node": end.node,
            "num_compilations": self._num_compilations,
            "peak_memory_bytes": {
                "coordinator": peak_memory_bytes(),
                "agents": self._agents,
                "workers": self._workers,
            },
        }
