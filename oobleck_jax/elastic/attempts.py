"""How often a step was tried in vain: what keeps a run from failing at the same step for ever."""

from oobleck_jax.elastic.limits import Limits


class Attempts:
    """The generations that were lost since the last commit, and why."""

    def __init__(self) -> None:
        self._causes: list[str] = []
        self._num_blameless = 0  # in a row

    def add(self, cause: str, *, is_blameless: bool) -> None:
        """Take note of a generation that was lost after its nodes had begun to prepare."""
        self._causes.append(cause)
        self._num_blameless = self._num_blameless + 1 if is_blameless else 0

    def __len__(self) -> int:
        return len(self._causes)

    def clear(self) -> None:
        """A step was committed."""
        self._causes.clear()
        self._num_blameless = 0

    def why_give_up(self, step: int, limits: Limits) -> str | None:
        """Return why the run must end, with the history of causes; None when it may try again."""
        if self._num_blameless > limits.max_blameless_attempts:
            trouble = f"{self._num_blameless} times in a row, and no node is known to be at fault"
        elif len(self._causes) > limits.max_attempts_per_step:
            trouble = f"{len(self._causes)} times; something in this step may bring its nodes down"
        else:
            return None
        history = "; ".join(f"({number}) {cause}" for number, cause in enumerate(self._causes, 1))
        return f"step {step} failed {trouble}: {history}"
