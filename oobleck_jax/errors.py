"""Errors that users meet. Each says what happened, the numbers, and the way out.

OobleckError
  ConfigError (ValueError)    a flag, preset or file cannot be used
    DataError                 the token file cannot be used
    PlanError                 no plan exists, or a given plan is invalid
      NotEnoughNodes          fewer nodes than the smallest template needs
  RunFailed                   a run ended early; names the node and the cause
  ActionRefused               what a person asked of a run cannot be done
  UnsupportedJax              this jax or jaxlib lacks something that is needed
  Abandoned                   a wait ended because its generation or run is over (internal)
  PeerLost                    a wait ended because a node that it depended on is gone (internal)
  Stalled                     a wait went on longer than its limit (internal)
  StateDamaged                a layer state arrived with other bits than it was sent with (internal)
  CheckpointDamaged           a part of a checkpoint is missing or has other bits than were saved
  CheckpointUnreadable        a part of a checkpoint, which may be intact, could not be read
  CheckpointUnwritable        a checkpoint, or a part of it, could not be written
  ObjectStoreError (OSError)  an object store does not answer, or refuses
"""

import errno
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from oobleck_jax.checkpoint.object_store import ObjectPath


class OobleckError(Exception):
    """Root of all errors raised on purpose by this package."""


class ConfigError(OobleckError, ValueError):
    """A flag, a preset or a file cannot be used as given."""


class DataError(ConfigError):
    """The token file is missing, damaged, or does not fit the model."""


class PlanError(ConfigError):
    """No plan exists for the request, or a given plan breaks a rule."""


class NotEnoughNodes(PlanError):
    """Fewer nodes than the smallest template needs.

    Attributes:
        num_nodes: nodes there are.
        num_needed: nodes that would be enough.
    """

    def __init__(self, message: str, *, num_nodes: int, num_needed: int) -> None:
        super().__init__(message)
        self.num_nodes = num_nodes
        self.num_needed = num_needed


class RunFailed(OobleckError):
    """A run ended before its last step.

    Attributes:
        node: id of the node that failed first, or None when no node is to blame.
    """

    def __init__(self, message: str, *, node: int | None = None) -> None:
        super().__init__(message)
        self.node = node


class ActionRefused(OobleckError):
    """What a person asked of a run cannot be done, and why."""


class Abandoned(OobleckError):
    """A wait ended because its generation, or the whole run, is over."""


class UnsupportedJax(OobleckError, ImportError):
    """The installed jax or jaxlib lacks something that this package needs."""


class PeerLost(OobleckError):
    """A wait ended because a node that it depended on is gone.

    Attributes:
        what: what was waited for.
        node: the node that it depended on, where known.
    """

    def __init__(self, message: str, *, what: str, node: int | None = None) -> None:
        super().__init__(message)
        self.what = what
        self.node = node


class Stalled(OobleckError):
    """A wait went on longer than its limit, and nobody is known to be dead.

    Attributes:
        what: what was waited for.
        waited_s: how long, in seconds.
        node: the node that was waited for, where known.
    """

    def __init__(self, message: str, *, what: str, waited_s: float, node: int | None = None) -> None:
        super().__init__(message)
        self.what = what
        self.waited_s = waited_s
        self.node = node


class StateDamaged(OobleckError):
    """A state arrived with other bits than it was sent with.

    Attributes:
        node: who sent it.
        group: what it belongs to.
    """

    def __init__(self, *, node: int, group: str) -> None:
        super().__init__(f"the state of {group} from node {node} arrived damaged: its checksum differs")
        self.node = node
        self.group = group


class CheckpointDamaged(OobleckError):
    """A part of a checkpoint is missing, or has other bits than were saved.

    Attributes:
        step: last step that the checkpoint contains; None: unknown.
        group: whose state is damaged; None: the checkpoint as a whole.
        file: the damaged file, where known.
    """

    def __init__(self, what: str, *, step: int | None, group: str | None, file: "Path | ObjectPath | None") -> None:
        place = "a checkpoint" if step is None else f"the checkpoint of step {step}"
        super().__init__(f"{place} is damaged: {file or group or 'it'} {what}")
        self.step = step
        self.group = group
        self.file = file


class CheckpointUnreadable(OobleckError):
    """A part of a checkpoint could not be read here and now; it may be intact.

    Attributes:
        step: last step that the checkpoint contains.
        group: whose state could not be read.
    """

    def __init__(self, cause: str, *, step: int, group: str) -> None:
        super().__init__(f"the checkpoint of step {step} cannot be read here, which may be intact: {group}: {cause}")
        self.step = step
        self.group = group


class CheckpointUnwritable(OobleckError):
    """A checkpoint, or a part of it, could not be written; training does not depend on it.

    Attributes:
        path: what could not be written.
    """

    def __init__(self, path: "Path | ObjectPath", cause: str) -> None:
        way_out = (
            "free space, or choose another folder" if isinstance(path, Path) else "see that all nodes may write there"
        )
        super().__init__(f"{path} cannot be written: {cause}; {way_out}")
        self.path = path


class ObjectStoreError(OobleckError, OSError):
    """An object store does not answer, or refuses; not raised for objects that are not there.

    Attributes:
        path: what was asked for.
    """

    def __init__(self, path: "ObjectPath", cause: str) -> None:
        super().__init__(errno.EIO, cause, str(path))
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.strerror}"


def cause_of(error: BaseException) -> str:
    """Return in one line what an error of other people's code says."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip()
    if "No space left on device" in text or "RESOURCE_EXHAUSTED" in text:  # Orbax
        return "No space left on device"
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
