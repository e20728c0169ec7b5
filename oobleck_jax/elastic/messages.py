"""Control messages: typed, validated JSON. One union for each direction.

    worker  --(socket pair)-->  agent  --(WebSocket)-->  coordinator      ToCoordinator
    worker  <--(socket pair)--  agent  <--(WebSocket)--  coordinator      ToNode

The agent relays everything between its worker and the coordinator unread but for the messages that it sends or takes
itself (`Join`, `Heartbeat`, `WorkerExited`; `Welcome`, `Refused`, `Stop`). Tensors never travel this way.

JSON has no NaN: a sum that is not finite travels as null.

A run is a sequence of generations. In each, in this order:

    coordinator: Begin(generation, plan, members)     every worker lays out its stages, fetches state, makes the fabric
    worker:      Progress* Prepared(generation)
    coordinator: Run(generation, step)                sent when all are prepared; the barrier before the first step
    worker:      Waiting* Vote(generation, step)      its gradients are summed; it waits
    coordinator: Commit(generation, step)             the step counts; the worker updates and begins the next
    worker:      Evaluated(generation, step)          after a commit that an evaluation follows, from last stages
    coordinator: SaveCheckpoint(generation, step)     after a commit, now and then; steps go on meanwhile
    worker:      Saved(generation, step) | NotSaved   what it was elected for is on disk, or cannot be written
    coordinator: Abandon(generation) | Stop

If the run goes back to a checkpoint, `Begin.restore` says to which; a worker that cannot read it says `RestoreFailed`.
When a worker is lost but its agent lives, the coordinator sends `Respawn`, and the new incarnation says `WorkerReady`.
When the coordinator is lost, the agents keep their workers and join its successor with `Join.worker` and `Join.held`.
A node that is to leave (SIGTERM) says `Leaving` and gets its `Stop` once the others do without it.
"""

from typing import NewType, TypeAlias

import msgspec

from oobleck_jax.checkpoint.manifest import GroupRecord
from oobleck_jax.planning.plan import NodeId, Plan, Stage


RunId = NewType("RunId", str)
"""Differs from run to run, and from start to start of a coordinator."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all control messages; the JSON field `type` names the class."""


# ------------------------------------------------------------------------------------------- to the coordinator


class WorkerReady(Message, frozen=True, kw_only=True):
    """A worker has its home runtime and waits for a generation."""

    node: NodeId
    incarnation: int
    link_address: str  # host:port of its link
    num_devices: int
    device_kind: str


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The state that a worker has."""

    generation: int  # the last one that ran
    step: int  # the last step that was applied; -1: none
    layers: tuple[int, ...]


class Join(Message, frozen=True, kw_only=True):
    """An agent asks to take part. The coordinator answers Welcome or Refused."""

    name: str  # a name for people, such as the host name
    incarnation: int  # counts the starts of this node's worker
    num_devices: int
    versions: dict[str, str]  # of python, jax, jaxlib and this package; must equal the coordinator's
    node: NodeId | None = None  # the id it had before, when it comes back
    config_digest: str | None = None  # of its own flags where it has any; must equal the coordinator's
    worker: WorkerReady | None = None  # that has lived on while its agent was without a coordinator
    held: Held | None = None  # what that worker has, counting the commits that were passed on to it
    agent: str = ""  # of this process and no other: by it an agent replaces a connection of its own
    log_dir: str | None = None  # on its host, where node-K.log goes; None: to the output of the agent


class Heartbeat(Message, frozen=True, kw_only=True):
    """An agent is alive."""

    node: NodeId
    is_worker_stopped: bool = False  # a signal (SIGSTOP) has stopped its worker


class Leaving(Message, frozen=True, kw_only=True):
    """A node has been asked to leave (SIGTERM): plan without it from the next step on, and send it a Stop."""

    node: NodeId
    reason: str


class WorkerExited(Message, frozen=True, kw_only=True):
    """The worker process of a node ended (told by its agent).

    Told twice of one that was killed: first when it begins to end, because its memory may take long to be given back.
    """

    node: NodeId
    incarnation: int
    exit_code: int  # negative: the signal that killed it
    is_gone: bool = True  # False: it was killed and is about to be gone; its last incarnation cannot do anything more
    is_started: bool = True  # False: it could not be, and log_tail says why
    log_tail: str  # last lines it wrote
    peak_memory_bytes: int = 0  # resident, of the worker
    agent_peak_memory_bytes: int = 0  # resident, of the agent itself


class Progress(Message, frozen=True, kw_only=True):
    """A worker tells how far a long preparation is."""

    node: NodeId
    generation: int
    phase: str  # such as "compile"
    done: int
    total: int


class CompiledAhead(Message, frozen=True, kw_only=True):
    """How far a worker is with the programs that plans after a loss may need; it trains meanwhile."""

    node: NodeId
    generation: int
    done: int
    total: int


class Prepared(Message, frozen=True, kw_only=True):
    """A worker has laid out its stages and its fabric is warm."""

    node: NodeId
    generation: int
    num_compilations: int  # since the process began
    seconds: dict[str, float]  # per phase of the preparation
    num_new_compilations: int = 0  # of this preparation: programs that were not ready
    received_bytes: int = 0  # of layer states, from other nodes


class Waiting(Message, frozen=True, kw_only=True):
    """A wait of a worker takes far longer than usual: repeated every second or so until it ends.

    When a step makes no progress, the node that others wait for, and that waits for nobody, is the one to blame.
    """

    node: NodeId
    generation: int
    step: int
    waits_for: NodeId


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a holder saw of one parameter group's summed gradient; all holders must report the same."""

    group: str
    squared_norm: float | None  # None: not finite
    checksum: int  # of the bits of the sum


class Vote(Message, frozen=True, kw_only=True):
    """A worker has all gradient sums of a step."""

    node: NodeId
    generation: int
    step: int
    loss_sum: float | None  # over the tokens of its last stages; 0.0 elsewhere; None: not finite
    num_tokens: int  # that loss_sum covers
    is_finite: bool  # losses and gradients
    groups: tuple[GroupReport, ...]
    seconds: dict[str, float]  # compute, wait, sum: where the step went
    num_new_compilations: int = 0  # that the step waited for


class Evaluated(Message, frozen=True, kw_only=True):
    """Evaluation losses of a worker's last stages after a committed step."""

    node: NodeId
    generation: int
    step: int
    loss_sum: float | None  # None: not finite
    num_tokens: int


class Saved(Message, frozen=True, kw_only=True):
    """The part of a checkpoint that a worker was elected for is on disk."""

    node: NodeId
    generation: int
    step: int
    groups: dict[str, GroupRecord]
    seconds: dict[str, float]  # copy, write


class NotSaved(Message, frozen=True, kw_only=True):
    """A worker cannot write its part of a checkpoint, and why."""

    node: NodeId
    generation: int
    step: int
    reason: str


class RestoreFailed(Message, frozen=True, kw_only=True):
    """A worker cannot restore the checkpoint of `Begin.restore`, and why: it waits for `Abandon`."""

    node: NodeId
    generation: int
    reason: str
    may_be_intact: bool = False  # it could not be read there and then


class Failed(Message, frozen=True, kw_only=True):
    """A worker cannot go on. It exits after this, or, where this is collateral, waits for `Abandon` or `Stop`."""

    node: NodeId
    incarnation: int
    generation: int
    error: str  # type and message, one line
    traceback: str
    blames: NodeId | None = None  # the node that it lost or waited for; None: the fault is its own, or nobody's

    @property
    def is_collateral(self) -> bool:
        """Whether this is likely the consequence of another node's failure."""
        return self.blames is not None or self.error.partition(":")[0] in ("PeerLost", "Stalled")


ToCoordinator: TypeAlias = (
    Join
    | Heartbeat
    | Leaving
    | WorkerExited
    | WorkerReady
    | Progress
    | CompiledAhead
    | Prepared
    | Waiting
    | Vote
    | Evaluated
    | Saved
    | NotSaved
    | RestoreFailed
    | Failed
)


# ------------------------------------------------------------------------------------------------- to a node


class Welcome(Message, frozen=True, kw_only=True):
    """The node is in, under this id. The agent starts its worker with this configuration."""

    node: NodeId
    config_json: str  # preset reference and all its fields, from config_to_json
    cores: tuple[int, ...]  # cores to pin the worker to; empty: do not pin
    num_threads: int  # compute threads of the worker; 0: as many as it has cores
    run_id: RunId
    faults: tuple[str, ...] = ()  # what is to go wrong with this worker on purpose (faults.py)
    ahead: tuple[Stage, ...] = ()  # stages whose programs it gets ready before it is ready itself: the run has begun


class Refused(Message, frozen=True, kw_only=True):
    """The node may not take part, and why."""

    reason: str


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a generation."""

    node: NodeId
    link_address: str
    cores: tuple[int, ...] = ()  # cores to run on in this generation; empty: any
    holds: tuple[int, ...] = ()  # layers whose state after step - 1 it has; keep it until `Run`


class RestorePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint to go on from."""

    folder: str
    step: int  # the last one that it contains

    @property
    def next_step(self) -> int:
        return self.step + 1


class Begin(Message, frozen=True, kw_only=True):
    """Lay out this plan and make its fabric."""

    generation: int
    plan: Plan
    members: tuple[Member, ...]  # ascending by node; the position is the rank in the fabric
    fabric_address: str  # of this generation's coordination service, host:port
    step: int  # first step to run; parameters are those after step - 1
    ahead: tuple[Stage, ...] = ()  # stages that later plans may need: compile them while training, in this order
    evaluate_first: bool = False  # the evaluation after step - 1 was cut short: do it before the step
    restore: RestorePoint | None = None  # take every state from here: nobody holds any


class Run(Message, frozen=True, kw_only=True):
    """All members are prepared: run steps from this one on."""

    generation: int
    step: int


class Commit(Message, frozen=True, kw_only=True):
    """The step counts. Clip with this norm, update, go on with the next step."""

    generation: int
    step: int
    global_norm: float | None  # None: not finite; nobody updates
    is_last: bool = False  # there is no next step


class SaveCheckpoint(Message, frozen=True, kw_only=True):
    """Write the states after this step. Who writes what follows from the generation's plan, on every node alike."""

    generation: int
    step: int
    folder: str


class Respawn(Message, frozen=True, kw_only=True):
    """To the agent: end the worker if it still runs, wait, and start the next incarnation."""

    incarnation: int  # of the new worker
    delay_s: float
    reason: str
    ahead: tuple[Stage, ...] = ()  # as in Welcome


class Abandon(Message, frozen=True, kw_only=True):
    """The generation is over: drop the step and the fabric, wait for the next Begin."""

    generation: int
    reason: str


class Stop(Message, frozen=True, kw_only=True):
    """The run is over: exit."""

    reason: str
    exit_code: int = 0  # of the whole run


ToNode: TypeAlias = Welcome | Refused | Begin | Run | Commit | SaveCheckpoint | Respawn | Abandon | Stop


_encoder = msgspec.json.Encoder()
_to_coordinator = msgspec.json.Decoder(ToCoordinator)
_to_node = msgspec.json.Decoder(ToNode)


def encode(message: Message) -> bytes:
    """Return the JSON of a message."""
    return _encoder.encode(message)


def decode_to_coordinator(data: bytes | str) -> ToCoordinator:
    """Return the message from a node.

    Raises:
        msgspec.ValidationError: not a message of this direction, or a field of the wrong type.
    """
    return _to_coordinator.decode(data)


def decode_to_node(data: bytes | str) -> ToNode:
    """Return the message from the coordinator.

    Raises:
        msgspec.ValidationError: not a message of this direction, or a field of the wrong type.
    """
    return _to_node.decode(data)
