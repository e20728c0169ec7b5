"""The run in Prometheus' form, for `GET /metrics`."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from oobleck_jax.dashboard.run_state import RunState
from oobleck_jax.dashboard.snapshot import NodeState, RunPhase


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_KINDS = ("loss", "leave", "join", "coordinator")  # of incidents
_BUCKETS_S = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics(Collector):
    """Turns the state of a run into metrics whenever somebody asks."""

    def __init__(self, state: RunState, clock: Callable[[], float]) -> None:
        self._state = state
        self._clock = clock
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> tuple[Metric, ...]:
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; what is not known yet is left out."""
        now = self._clock()
        run = self._state.snapshot(now)
        info = GaugeMetricFamily("oobleck_run_info", "The run.", labels=["preset", "run_dir"])
        info.add_metric([run.preset, run.run_dir], 1)
        yield info
        phases = GaugeMetricFamily("oobleck_phase", "1 for what the run does, 0 for all else.", labels=["phase"])
        for phase in RunPhase:
            phases.add_metric([phase], float(phase is run.phase))
        yield phases
        nodes = GaugeMetricFamily("oobleck_nodes", "Nodes by what they do.", labels=["state"])
        counts = Counter(node.state for node in run.nodes)
        for state in NodeState:
            nodes.add_metric([state], counts[state])
        yield nodes
        alive = run.num_live_nodes
        age_s = None if run.checkpoint is None else now - run.checkpoint.time
        gauges: tuple[tuple[str, str, float | None], ...] = (
            ("oobleck_step", "Steps that count.", run.step),
            ("oobleck_steps_planned", "Steps to do.", run.steps),
            ("oobleck_generation", "Number of the current generation.", run.generation),
            ("oobleck_loss", "Training loss of the last step that counts.", run.loss),
            ("oobleck_eval_loss", "Evaluation loss.", run.eval_loss),
            ("oobleck_grad_norm", "Norm of the gradient, before clipping.", run.grad_norm),
            ("oobleck_tokens_per_second", "Throughput of the last steps.", run.tokens_per_s),
            ("oobleck_mfu_ratio", "Model operations per second, as a share of the devices' peak.", run.mfu),
            ("oobleck_goodput_ratio", "Share of the time since the first step that counts.", run.goodput),
            ("oobleck_live_nodes", "Nodes that live.", alive),
            ("oobleck_survivable_losses", "Nodes that may be lost at once, whichever they are.", run.survivable),
            ("oobleck_seconds_left", "Time to the last step, at the rate of the last steps.", run.seconds_left),
            ("oobleck_checkpoint_age_seconds", "Age of the newest checkpoint.", age_s),
            ("oobleck_checkpoint_step", "Last step of it.", None if run.checkpoint is None else run.checkpoint.step),
        )
        for name, text, value in gauges:
            if value is not None:
                yield GaugeMetricFamily(name, text, value=value)
        incidents = CounterMetricFamily("oobleck_incidents", "Changes of membership, by kind.", labels=["kind"])
        recovery = HistogramMetricFamily(
            "oobleck_recovery_seconds", "From the first notice to the first commit after it.", labels=["kind"]
        )
        for kind in sorted({*_KINDS, *run.num_incidents}):
            times_s = [seconds for it, seconds in self._state.recoveries_s if it == kind]
            incidents.add_metric([kind], len(times_s))
            recovery.add_metric([kind], _buckets(times_s), sum_value=sum(times_s))
        yield incidents
        yield recovery
        yield CounterMetricFamily(
            "oobleck_redone_microbatches", "Microbatches computed again.", value=run.num_redone_microbatches
        )


def _buckets(values: list[float]) -> list[tuple[str, float]]:
    """Return (upper bound, how many values are not above it), the last for all values."""
    counts = [0] * (len(_BUCKETS_S) + 1)
    for value in values:
        counts[bisect_left(_BUCKETS_S, value)] += 1
    total, buckets = 0, list[tuple[str, float]]()
    for bound, count in zip([*map(str, _BUCKETS_S), "+Inf"], counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
