"""Loss and time over steps, in bounded memory: neighbours are merged when points become too many."""

from dataclasses import dataclass

from oobleck_jax.dashboard.snapshot import CurveView


_MAX_POINTS = 600  # more than a screen has columns for


@dataclass(kw_only=True, slots=True)
class _Run:
    """Consecutive steps."""

    first_step: int
    num_steps: int
    loss_sum: float
    seconds: float

    def keep(self, num_steps: int) -> None:
        """Keep only the first steps, each with the mean of all."""
        share = num_steps / self.num_steps
        self.num_steps, self.loss_sum, self.seconds = num_steps, self.loss_sum * share, self.seconds * share


class Curve:
    """What each step brought and took; steps come in order, and can be taken back from the end."""

    def __init__(self, *, max_points: int = _MAX_POINTS) -> None:
        self._max_points = max_points
        self._stride = 1  # steps of a run
        self._runs: list[_Run] = []

    @property
    def seconds(self) -> float:
        """The time that all steps took."""
        return sum(run.seconds for run in self._runs)

    def add(self, step: int, loss: float, seconds: float) -> None:
        """Add the next step."""
        last = self._runs[-1] if self._runs else None
        if last is None or last.num_steps >= self._stride:
            if len(self._runs) >= self._max_points:
                self._merge()
                return self.add(step, loss, seconds)
            self._runs.append(_Run(first_step=step, num_steps=1, loss_sum=loss, seconds=seconds))
        else:
            last.num_steps, last.loss_sum, last.seconds = (
                last.num_steps + 1,
                last.loss_sum + loss,
                last.seconds + seconds,
            )
        return None

    def take_back(self, step: int) -> None:
        """Forget the steps from `step` on: they count no more."""
        while self._runs and self._runs[-1].first_step >= step:
            self._runs.pop()
        if self._runs and (num_steps := step - self._runs[-1].first_step) < self._runs[-1].num_steps:
            self._runs[-1].keep(num_steps)

    def view(self, tokens_per_step: int) -> CurveView:
        return CurveView(
            steps=tuple(run.first_step for run in self._runs),
            losses=tuple(round(run.loss_sum / run.num_steps, 5) for run in self._runs),
            tokens_per_s=tuple(
                round(tokens_per_step * run.num_steps / max(run.seconds, 1e-9), 1) for run in self._runs
            ),
        )

    def _merge(self) -> None:
        self._stride *= 2
        pairs = [self._runs[index : index + 2] for index in range(0, len(self._runs), 2)]
        self._runs = [
            _Run(
                first_step=pair[0].first_step,
                num_steps=sum(run.num_steps for run in pair),
                loss_sum=sum(run.loss_sum for run in pair),
                seconds=sum(run.seconds for run in pair),
            )
            for pair in pairs
        ]
