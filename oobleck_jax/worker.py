"""The worker: one process per node that owns its devices, and does what the coordinator's messages say.

It joins the two halves of the package: messages and generations from `elastic`, tensors from `execution`. Two threads
matter: this one, and the one of `control` that reads messages while this one computes. The process ends when its agent
closes the control channel, so it waits for nothing without an end.
"""

import argparse
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from models.presets import config_from_json
from oobleck_jax.config import RunConfig
from oobleck_jax.control import Control, SocketControl, failure, receive_or_abandon
from oobleck_jax.data import TokenDataset
from oobleck_jax.elastic.lifeline import hold
from oobleck_jax.elastic.messages import (
    Abandon,
    Begin,
    Commit,
    CompiledAhead,
    Evaluated,
    GroupReport,
    Prepared,
    Progress,
    RestoreFailed,
    Run,
    SaveCheckpoint,
    Stop,
    Vote,
    Waiting,
    Welcome,
    WorkerReady,
)
from oobleck_jax.errors import Abandoned, CheckpointDamaged, CheckpointUnreadable, PeerLost, Stalled, StateDamaged
from oobleck_jax.execution.background import Background
from oobleck_jax.execution.compilations import compiled_since, num_compilations
from oobleck_jax.execution.fabric import Fabric, GlooFabric, free_dropped_fabrics, free_stuck_fabrics, keep_gloo_quiet
from oobleck_jax.execution.home import home_of, use_compilation_cache
from oobleck_jax.execution.link import TransferLink
from oobleck_jax.execution.meeting import Meeting
from oobleck_jax.execution.node import Generation, NodeTrainer, StepResult
from oobleck_jax.execution.patience import Patience
from oobleck_jax.execution.recorder import make_recorder
from oobleck_jax.inject import AtMoment, Moment, WorkerInjector
from oobleck_jax.launch import pin
from oobleck_jax.planning.plan import NodeId, Plan
from oobleck_jax.program_origin import store_of
from oobleck_jax.saved_states import StateSaver, pretrained_params, reader_of


logger = logging.getLogger(__name__)

ConnectFabric = Callable[[Begin, int, threading.Event], Fabric]
"""Makes the fabric of a generation, given the rank of this node in it, and what is set when it is no longer needed."""

WAIT_LIMIT_S = 600.0  # the coordinator finds a stuck node much earlier; this only ends what it cannot see


# The thread that starts programs waits so long for Python's lock while another one works, instead of 5 ms, and no more
# than 10 ms of work are queued for the devices (pace.py): they would stand still while a checkpoint is written.
_SWITCH_S = 0.5e-3


class _Stopped(Exception):
    """A `Stop` came in the middle of a step."""


class Worker:
    """Serves one node until the run is over."""

    def __init__(
        self,
        *,
        node: NodeId,
        incarnation: int,
        config: RunConfig,
        trainer: NodeTrainer,
        control: Control,
        connect_fabric: ConnectFabric,
        at_moment: AtMoment = lambda moment, step: None,
    ) -> None:
        self._at_moment = at_moment
        self._node, self._config, self._trainer, self._control = node, config, trainer, control
        self._incarnation, self._connect_fabric = incarnation, connect_fabric
        self._meeting: Meeting | None = None
        self._fabric: Fabric | None = None
        self._begin: Begin | None = None
        self._generation = 0  # the last one
        self._background = Background("background")
        self._applied = -1  # the last step whose update was applied
        self._plan: Plan | None = None  # of the generation that applied it: says who holds what
        self._saver = StateSaver(node, trainer, control.send)

    def serve(self) -> str:
        """Do what the messages say until `Stop`; return its reason."""
        is_abandoned = False
        while True:
            if is_abandoned:  # not while the exception is handled: its frames hold on to the fabric
                self._drop_fabric()
                is_abandoned = False
            message = self._control.receive()
            try:
                match message:
                    case Begin():
                        self._prepare(message)
                    case Run() if self._begin and message.generation == self._begin.generation:
                        self._run(message.step)
                    case Abandon():
                        self._drop_fabric()
                    case SaveCheckpoint():
                        self._saver.save(message, plan=self._plan, applied=self._applied)
                    case Stop():
                        return message.reason
                    case _:
                        logger.info("ignored %s: it belongs to no generation at work", message)
            except Abandoned:
                is_abandoned = True
            except _Stopped as stopped:
                return str(stopped)
            except (CheckpointDamaged, CheckpointUnreadable) as error:
                may_be_intact = isinstance(error, CheckpointUnreadable)
                failed = RestoreFailed(
                    node=self._node, generation=self._generation, reason=str(error), may_be_intact=may_be_intact
                )
                self._control.send(failed)
            except (PeerLost, Stalled, StateDamaged) as error:
                # The coordinator decides what follows; Abandon or Stop comes next.
                self._control.send(failure(self._node, self._incarnation, self._generation, error))

    def log_fingerprints(self) -> None:
        """Write a checksum of each group's state into the log, by which replicas can be compared (property T3)."""
        for group, checksum in sorted(self._trainer.fingerprints().items()):
            logger.info("state of %s after step %d: %016x", group, self._applied, checksum)

    # -- a generation

    def _prepare(self, begin: Begin) -> None:
        self._drop_fabric()
        me = next(member for member in begin.members if member.node == self._node)
        pin(me.cores)
        self._begin, self._generation = begin, begin.generation
        assert not me.holds or self._applied == begin.step - 1, (
            f"node {self._node} has the state after step {self._applied}, but generation {begin.generation} begins "
            f"with step {begin.step} and counts on its layers {me.holds}"
        )
        if begin.generation > 1:
            self._at_moment(Moment.RECOVERY, begin.step)
        ranks = {member.node: rank for rank, member in enumerate(begin.members)}
        generation = Generation(
            number=begin.generation,
            plan=begin.plan,
            node=self._node,
            link_addresses={member.node: member.link_address for member in begin.members},
            ranks=ranks,
            step=begin.step,
            holdings={member.node: member.holds for member in begin.members},
        )
        if sums := self._trainer.fabric_sums(generation):
            self._meeting = Meeting(partial(self._make_fabric, begin, sums))
        restore = reader_of(begin.restore, partial(self._progress, "load", 0, 1))
        preparation = self._trainer.prepare(
            generation, progress=self._progress, patience=self._patience(begin.step), restore=restore
        )
        prepared_s = time.monotonic()
        if self._meeting is not None:
            self._fabric = self._meeting.wait(WAIT_LIMIT_S, self._control.abandoned)
        self._control.send(
            Prepared(
                node=self._node,
                generation=begin.generation,
                num_compilations=self._trainer.home.num_compilations,
                num_new_compilations=preparation.num_compilations,
                received_bytes=preparation.received_bytes,
                seconds={**preparation.seconds, "fabric": time.monotonic() - prepared_s},
            )
        )

    def _make_fabric(
        self, begin: Begin, sums: Sequence[tuple[tuple[int, ...], int]], abandoned: threading.Event
    ) -> Fabric:
        rank = [member.node for member in begin.members].index(self._node)
        fabric = self._connect_fabric(begin, rank, abandoned)
        try:
            fabric.warm(sums, limit_s=WAIT_LIMIT_S, abandoned=abandoned)
        except BaseException:
            fabric.drop()
            raise
        fabric.detach()
        return fabric

    def _progress(self, phase: str, done: int, total: int) -> None:
        if self._control.abandoned.is_set():
            raise Abandoned(f"during {phase}")
        self._control.send(Progress(node=self._node, generation=self._generation, phase=phase, done=done, total=total))

    def _drop_fabric(self) -> None:
        self._background.stop()  # the next generation needs the cores first
        if self._begin is not None:
            self._trainer.abandon()  # first, because sums are views of the fabric's memory
        if self._meeting is not None:
            self._meeting.drop()
        self._meeting = self._fabric = self._begin = None

    # -- steps

    def _run(self, first_step: int) -> None:
        assert self._begin is not None
        self._trainer.start()
        self._applied, self._plan = first_step - 1, self._begin.plan
        if self._begin.evaluate_first:
            self._evaluate(first_step - 1)
        for step in range(first_step, self._config.steps):
            num_compilations_before = num_compilations()
            result = self._trainer.compute(step, fabric=self._fabric, patience=self._patience(step))
            self._control.send(self._vote(step, result, num_compilations() - num_compilations_before))
            self._at_moment(Moment.VOTE, step)
            self._trainer.look_ahead(step + 1)
            commit = self._await_commit(step)
            self._at_moment(Moment.COMMIT, step)
            self._trainer.commit(step, commit.global_norm)
            self._applied = step
            if step == first_step:  # not before: the first step after a recovery has been waited for long enough
                if names := compiled_since(num_compilations_before):
                    what = f"{len(names)} programs were compiled in step {step} of generation {self._begin.generation}"
                    logger.warning("%s: %s", what, ", ".join(names))
                self._background.begin(self._prepare_for_losses(self._begin))
            if self._config.evaluates_after(step):
                self._evaluate(step)
            if commit.is_last:
                return

    def _prepare_for_losses(self, begin: Begin) -> Iterator[None]:
        """Do what must not be left to the next recovery, piece by piece, in the background."""
        is_free = free_dropped_fabrics()
        yield
        rank = [member.node for member in begin.members].index(self._node)
        for done, total in self._trainer.compile_ahead(begin.ahead, rank=rank, num_ranks=len(begin.members)):
            self._control.send(CompiledAhead(node=self._node, generation=begin.generation, done=done, total=total))
            yield
        if not is_free:
            yield from free_stuck_fabrics()

    def _vote(self, step: int, result: StepResult, num_new_compilations: int) -> Vote:
        assert self._begin is not None
        return Vote(
            node=self._node,
            generation=self._begin.generation,
            step=step,
            loss_sum=result.loss_sum,
            num_tokens=result.num_tokens,
            is_finite=result.is_finite,
            groups=tuple(
                GroupReport(group=item.group, squared_norm=item.squared_norm, checksum=item.checksum)
                for item in result.reports
            ),
            seconds=result.seconds,
            num_new_compilations=num_new_compilations,
        )

    def _await_commit(self, step: int) -> Commit:
        while True:
            message = receive_or_abandon(self._control)
            match message:
                case Commit() if message.step == step:
                    return message
                case SaveCheckpoint():  # the state is still that after the last step
                    self._saver.save(message, plan=self._plan, applied=self._applied)
                case Stop():
                    raise _Stopped(message.reason)
                case _:
                    logger.info("ignored %s while waiting for the commit of step %d", message, step)

    def _evaluate(self, step: int) -> None:
        assert self._begin is not None
        losses = self._trainer.evaluate(step, self._patience(step))
        if losses.num_tokens:
            self._control.send(
                Evaluated(
                    node=self._node,
                    generation=self._begin.generation,
                    step=step,
                    loss_sum=losses.loss_sum,
                    num_tokens=losses.num_tokens,
                )
            )

    def _patience(self, step: int) -> Patience:
        assert self._begin is not None
        generation = self._begin.generation

        def tell(node: NodeId) -> None:
            self._control.send(Waiting(node=self._node, generation=generation, step=step, waits_for=node))

        return Patience(abandoned=self._control.abandoned, limit_s=WAIT_LIMIT_S, on_waiting=tell)


def main() -> None:
    """Run the worker process: `python -m oobleck_jax.worker --control-fd N`."""
    parser = argparse.ArgumentParser(description="Serve one node of a run; started by its agent.")
    parser.add_argument("--control-fd", type=int, required=True, help="inherited socket whose other end the agent has")
    parser.add_argument("--lifeline-fd", type=int, help="inherited, by which the agent learns that this process ends")
    parser.add_argument("--host", default="127.0.0.1", help="address of this host under which other nodes reach it")
    parser.add_argument("--incarnation", type=int, default=0, help="how often this node's worker was started before")
    parser.add_argument("--compilation-cache", type=Path, help="folder of compiled programs that all nodes share")
    parser.add_argument("--trace", type=Path, help="folder into which this process writes what it did when")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of every file
    keep_gloo_quiet()
    if arguments.lifeline_fd is not None:
        hold(arguments.lifeline_fd)
    control = SocketControl(socket.socket(fileno=arguments.control_fd))
    welcome = control.receive()
    if not isinstance(welcome, Welcome):
        return
    if arguments.compilation_cache is not None:
        use_compilation_cache(arguments.compilation_cache)
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()  # what was imported stays for good: recovery collects garbage, and need not look at it
    try:
        worker = _make_worker(welcome, control, arguments)
        reason = worker.serve()
        worker.log_fingerprints()
        logger.info("over: %s", reason)
    except Exception as error:
        logger.exception("this worker cannot go on")
        control.send(failure(welcome.node, arguments.incarnation, 0, error))
        _exit(1)
    _exit(0)


def _make_worker(welcome: Welcome, control: SocketControl, arguments: argparse.Namespace) -> Worker:
    preset, config = config_from_json(welcome.config_json)
    model = config.model.build()
    link = TransferLink(host=arguments.host)
    injector = WorkerInjector(welcome.faults, incarnation=arguments.incarnation)
    home = home_of(config, model, store_of(preset, config, arguments.compilation_cache, run_id=welcome.run_id))
    trainer = NodeTrainer(
        config=config,
        model=model,
        dataset=TokenDataset.open(config),
        home=home,
        link=link,
        at_moment=injector,
        recorder=make_recorder(arguments.trace, welcome.node, arguments.incarnation),
        pretrained=pretrained_params(config),
    )
    # A node that comes later finds most programs in the cache, and the others need not wait for any of them then.
    for done, total in trainer.compile_ahead(welcome.ahead, rank=0, num_ranks=1) if welcome.ahead else ():
        control.send(CompiledAhead(node=welcome.node, generation=0, done=done, total=total))
    control.send(
        WorkerReady(
            node=welcome.node,
            incarnation=arguments.incarnation,
            link_address=link.address,
            num_devices=len(home.devices),
            device_kind=home.devices[0].device_kind,
        )
    )

    def connect(begin: Begin, rank: int, abandoned: threading.Event) -> Fabric:
        return GlooFabric.connect(
            begin.fabric_address,
            rank=rank,
            num_nodes=len(begin.members),
            hostname=arguments.host,
            limit_s=WAIT_LIMIT_S,
            abandoned=abandoned,
        )

    return Worker(
        node=welcome.node,
        incarnation=arguments.incarnation,
        config=config,
        trainer=trainer,
        control=control,
        connect_fabric=connect,
        at_moment=injector,
    )


def _exit(code: int) -> None:
    """End the process at once: threads of an abandoned fabric may hang in a collective for ever."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
