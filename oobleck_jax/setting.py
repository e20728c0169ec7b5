"""What a session is given."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from oobleck_jax.config import RunConfig
from oobleck_jax.elastic.agent import AgentOptions
from oobleck_jax.elastic.limits import Limits
from oobleck_jax.elastic.terms import Checkpoints, Proposal
from oobleck_jax.inject import Injection
from oobleck_jax.past_run import PastRun
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.propose import Proposer
from oobleck_jax.run_checkpoints import RunCheckpoints
from oobleck_jax.run_dir import Contact, RunDir


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """All that a session is given; every part of it has been checked.

    Attributes:
        preset: reference of the configuration's preset.
        config: what the user asked for.
        proposer: what makes plans; its configuration, with what was chosen for the user, is the workers'.
        proposal: the plan to begin with.
        fabric_host: address of this machine as the nodes reach it.
        listen_host: address to listen on for them.
        is_local: all nodes are on this machine, so their cores can be chosen.
        max_nodes: the most there can be.
        agents: what to start on this machine.
        injections: what is to fail on purpose.
        token: secret of the nodes.
        limits: how long each wait may last.
        patience: factor of all time limits; `limits` have it.
        orphan_s: how long nodes wait for the successor of this process.
        tensorboard: write scalars for it.
        began_s: when the program began, by `time.monotonic`.
        checkpoints: of the run.
        checkpoint_terms: when they are due.
        past: the run that is to go on, if a coordinator before this one has begun it.
        is_restore_due: whether it must go on from a checkpoint, because no worker can have lived on.
        last_generation: that wrote checkpoints.
    """

    preset: str
    config: RunConfig
    proposer: Proposer
    proposal: Proposal
    run_dir: RunDir
    fabric_host: str
    listen_host: str
    is_local: bool
    max_nodes: int
    agents: Mapping[NodeId, AgentOptions]
    injections: tuple[Injection, ...]
    contact: Contact
    limits: Limits
    patience: float
    orphan_s: float
    summary_path: Path | None
    began_s: float
    checkpoints: RunCheckpoints
    checkpoint_terms: Checkpoints
    tensorboard: bool = False
    past: PastRun | None = None
    is_restore_due: bool = False
    last_generation: int = 0
