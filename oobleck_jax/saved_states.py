"""Where the states of a worker go to, and come from, besides other workers: checkpoints, and pretrained models."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from oobleck_jax.checkpoint.election import elect_writers
from oobleck_jax.checkpoint.files import location_of
from oobleck_jax.checkpoint.reader import read_state
from oobleck_jax.checkpoint.store import read_checkpoint
from oobleck_jax.checkpoint.writer import CheckpointWriter, Outcome, Written
from oobleck_jax.config import RunConfig
from oobleck_jax.elastic.messages import Message, NotSaved, RestorePoint, SaveCheckpoint, Saved
from oobleck_jax.errors import CheckpointDamaged, CheckpointUnreadable, ConfigError
from oobleck_jax.execution.layer_functions import Params
from oobleck_jax.execution.node import NodeTrainer, ReadState
from oobleck_jax.execution.state import GroupState
from oobleck_jax.planning.plan import NodeId, Plan


class StateSaver:
    """Writes the part of each checkpoint that a node is elected for, and tells when it is on disk, or why not."""

    def __init__(self, node: NodeId, trainer: NodeTrainer, send: Callable[[Message], None]) -> None:
        self._node, self._trainer, self._send = node, trainer, send
        self._writer = CheckpointWriter()

    def save(self, wanted: SaveCheckpoint, *, plan: Plan | None, applied: int) -> None:
        """Write in the background; the caller waits only for a copy in memory.

        Args:
            wanted: what to save.
            plan: that says who holds what; None: nobody holds anything yet.
            applied: the last step that was applied.
        """

        def fail(reason: str) -> None:
            self._send(NotSaved(node=self._node, generation=wanted.generation, step=wanted.step, reason=reason))

        def tell(outcome: Outcome) -> None:
            if not isinstance(outcome, Written):
                return fail(str(outcome))
            return self._send(
                Saved(
                    node=self._node,
                    generation=wanted.generation,
                    step=wanted.step,
                    groups=outcome.groups,
                    seconds=outcome.seconds,
                )
            )

        if plan is None or wanted.step != applied:
            return fail(f"it has the state after step {applied}")
        # Every node comes to the same result by itself.
        writers = elect_writers(self._trainer.groups, {node: plan.layers_of(node) for node in plan.nodes})
        states = self._trainer.held_states(group for group, node in writers.items() if node == self._node)
        if not self._writer.begin(location_of(wanted.folder), states, tell):
            fail("it still writes its parts of two others")
        return None


def reader_of(point: RestorePoint | None, tell: Callable[[], None]) -> ReadState | None:
    """Return what reads states from a checkpoint, if there is one.

    It raises CheckpointDamaged, or CheckpointUnreadable if that may be a matter of this node, or of this hour.

    Args:
        point: says which one.
        tell: called every few seconds while files are fetched; may raise to end it.
    """
    if point is None:
        return None

    checkpoint = cache(partial(read_checkpoint, location_of(point.folder)))  # not before the first group; once for all

    def read(group: str, shapes: GroupState) -> GroupState:
        try:
            return read_state(checkpoint(), group, shapes, tell=tell)
        except ConfigError as error:
            raise CheckpointDamaged(f"cannot be used: {error}", step=point.step, group=group, file=None) from error
        except OSError as error:
            raise CheckpointUnreadable(str(error), step=point.step, group=group) from error

    return read


def pretrained_params(config: RunConfig) -> Callable[[str], Params] | None:
    """Return what gives the parameters of a group before the first step; None: they are random."""
    if config.init_from is None:
        return None
    from models.gpt import GptConfig
    from oobleck_jax.huggingface import PretrainedGpt  # late: most runs do not need it

    assert isinstance(config.model, GptConfig)
    return PretrainedGpt(Path(config.init_from), config.model).params
