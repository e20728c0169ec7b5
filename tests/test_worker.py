"""The worker between coordinator and tensors: what it does with messages, above all that a commit counts (M2)."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from models.presets import load_preset
from oobleck_jax.checkpoint.object_store import ObjectPath
from oobleck_jax.checkpoint.reader import read_group
from oobleck_jax.checkpoint.store import CheckpointStore
from oobleck_jax.control import SocketControl
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.messages import (
    Abandon,
    Begin,
    Commit,
    Failed,
    Member,
    NotSaved,
    Prepared,
    RestoreFailed,
    RestorePoint,
    Run,
    SaveCheckpoint,
    Saved,
    Stop,
    Vote,
)
from oobleck_jax.errors import Abandoned, ObjectStoreError, PeerLost
from oobleck_jax.execution.node import Preparation, StepResult
from oobleck_jax.execution.state import GroupState
from oobleck_jax.inject import Moment
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.planning.reconfigure import State
from oobleck_jax.worker import Worker
from tests.checkpoint.checkpoints import manifest
from tests.execution.thread_cluster import plan_of


LIMIT_S = 60.0
NODE = NodeId(0)


class Tensors:
    """A `NodeTrainer` without tensors: it writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.home = self
        self.num_compilations = 0
        self.loses_peer_in: int | None = None
        self.groups = (State(name="layer-000", layers=(0,), num_bytes=4),)
        self.state = 0.0  # what `layer-000` has

    def prepare(self, generation, *, progress, patience, restore=None) -> Preparation:
        self.calls.append(f"prepare {generation.number}")
        if restore is not None:
            restore("layer-000", None)
        return Preparation(num_compilations=0, received_bytes=0, seconds={})

    def fabric_sums(self, generation) -> tuple[()]:
        return ()

    def start(self) -> None:
        self.calls.append("start")

    def compile_ahead(self, stages, *, rank, num_ranks) -> Iterator[tuple[int, int]]:
        yield 0, 0

    def compute(self, step, *, fabric, patience) -> StepResult:
        self.calls.append(f"compute {step}")
        if patience.abandoned.is_set():
            raise Abandoned("the step is no longer needed")
        if step == self.loses_peer_in:
            raise PeerLost("gone", what="a pull", node=1)
        return StepResult(loss_sum=1.0, num_tokens=1, reports=(), seconds={})

    def look_ahead(self, step) -> None:
        self.calls.append(f"look ahead to {step}")

    def commit(self, step, global_norm) -> None:
        self.calls.append(f"commit {step}")
        self.state = step + 0.5

    def held_states(self, names) -> dict[str, GroupState]:
        return {name: GroupState(params=np.full(3, self.state, np.float32), optimizer_state=()) for name in names}

    def abandon(self) -> None:
        self.calls.append("abandon")

    def fingerprints(self) -> dict[str, int]:
        return {"layer-000": len(self.calls)}


class Coordinator:
    """The other end of a worker's control channel."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.settimeout(LIMIT_S)
        self._lines = sock.makefile("rb")

    def send(self, *given: messages.Message) -> None:
        self._sock.sendall(b"".join(messages.encode(message) + b"\n" for message in given))

    def expect(self, kind: type) -> messages.ToCoordinator:
        """Return the next message that is no news of progress."""
        while True:
            message = messages.decode_to_coordinator(self._lines.readline())
            if not isinstance(message, messages.CompiledAhead | messages.Progress):
                assert isinstance(message, kind), message
                return message

    def close(self) -> None:
        self._lines.close()
        self._sock.close()

    def begin(self, generation: int, *, step: int, holds: tuple[int, ...] = (), **changes) -> None:
        """Begin, and run; with `restore`, the worker must say first that it cannot."""
        member = Member(node=NODE, link_address="127.0.0.1:1", holds=holds)
        plan = plan_of(([6], 8))
        self.send(Begin(generation=generation, plan=plan, members=(member,), fabric_address="", step=step, **changes))
        if changes:
            return
        self.expect(Prepared)
        self.send(Run(generation=generation, step=step))


class Serving:
    """A worker at work in a thread."""

    def __init__(self, at_moment=lambda moment, step: None) -> None:
        ours, theirs = socket.socketpair()
        self._sockets = (ours, theirs)
        self.coordinator = Coordinator(ours)
        self.control = SocketControl(theirs)
        self.tensors = Tensors()
        self._at_moment = at_moment
        config = load_preset("gpt-test")
        self._worker = Worker(
            node=NODE,
            incarnation=0,
            config=config,
            trainer=self.tensors,
            control=self.control,
            connect_fabric=lambda *_: pytest.fail("no fabric is needed"),
            at_moment=lambda moment, step: self._at_moment(self, moment, step),
        )
        self._reasons: list[str] = []
        self._thread = threading.Thread(target=lambda: self._reasons.append(self._worker.serve()), daemon=True)
        self._thread.start()

    def end(self) -> str:
        """Return the reason with which the worker stopped."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        self.coordinator.close()
        for sock in self._sockets:
            sock.close()
        return self._reasons[0]


@contextlib.contextmanager
def serving(at_moment=lambda serving, moment, step: None) -> Iterator[Serving]:
    worker = Serving(at_moment)
    yield worker
    worker.coordinator.send(Stop(reason="the test is over"))
    assert worker.end() == "the test is over"


def await_abandoned(worker: Serving) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not worker.control.abandoned.is_set():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_a_commit_before_an_abandon_is_carried_out_M2() -> None:
    """A coordinator that takes over sends what was decided, and then ends the generation: both wait in the inbox."""

    def when_voted(worker: Serving, moment: Moment, step: int) -> None:
        if (moment, step) == (Moment.VOTE, 1):
            await_abandoned(worker)  # so that both are there before either is looked at

    with serving(when_voted) as worker:
        worker.coordinator.begin(1, step=0)
        worker.coordinator.expect(Vote)
        worker.coordinator.send(Commit(generation=1, step=0, global_norm=1.0))
        worker.coordinator.expect(Vote)
        worker.coordinator.send(
            Commit(generation=1, step=1, global_norm=1.0), Abandon(generation=1, reason="a successor")
        )
        worker.coordinator.begin(2, step=2, holds=(0,))
        assert worker.coordinator.expect(Vote).step == 2
    steps = [call for call in worker.tensors.calls if call.startswith("commit")]
    assert steps == ["commit 0", "commit 1"]
    assert worker.tensors.calls.index("look ahead to 1") < worker.tensors.calls.index("commit 0")
    assert worker.tensors.calls.index("commit 1") < worker.tensors.calls.index("prepare 2")


def test_a_commit_is_carried_out_once_M2() -> None:
    with serving() as worker:
        worker.coordinator.begin(1, step=0)
        for step in range(3):
            assert worker.coordinator.expect(Vote).step == step
            commit = Commit(generation=1, step=step, global_norm=1.0)
            worker.coordinator.send(commit, commit)  # a successor does not know who has heard of it
        assert worker.coordinator.expect(Vote).step == 3
    assert [call for call in worker.tensors.calls if call.startswith("commit")] == ["commit 0", "commit 1", "commit 2"]


def test_an_abandoned_step_is_not_committed_M2() -> None:
    with serving() as worker:
        worker.coordinator.begin(1, step=0)
        worker.coordinator.expect(Vote)
        worker.coordinator.send(Abandon(generation=1, reason="a node is lost"))
        worker.coordinator.send(Commit(generation=1, step=0, global_norm=1.0))  # too late to mean anything
        worker.coordinator.begin(2, step=0)
        assert worker.coordinator.expect(Vote).generation == 2
    assert "commit 0" not in worker.tensors.calls


def test_a_worker_that_missed_a_commit_does_not_pretend_to_have_it_M2() -> None:
    worker = Serving(lambda worker, moment, step: None)
    with pytest.raises(AssertionError, match=r"has the state after step -1, but generation 2 begins with step 5"):
        worker._worker._prepare(
            Begin(
                generation=2,
                plan=plan_of(([6], 8)),
                members=(Member(node=NODE, link_address="", holds=(0,)),),
                fabric_address="",
                step=5,
            )
        )
    worker.coordinator.send(Stop(reason="over"))
    worker.end()


def test_a_checkpoint_has_the_state_of_its_step_while_the_next_is_computed(tmp_path) -> None:
    folder = tmp_path / "step-000000-generation-1"
    save = SaveCheckpoint(generation=1, step=0, folder=str(folder))
    with serving() as worker:
        worker.coordinator.begin(1, step=0)
        worker.coordinator.expect(Vote)
        # It comes with the commits before and after it, as it may when the worker is slow.
        commits = [Commit(generation=1, step=step, global_norm=1.0) for step in range(2)]
        worker.coordinator.send(commits[0], save, commits[1])
        said = [worker.coordinator.expect(Vote | Saved) for _ in range(3)]
        (saved,) = [message for message in said if isinstance(message, Saved)]
        assert {message.step for message in said} == {0, 1, 2}
        # Too late: it has gone on.
        worker.coordinator.send(save)
        assert "it has the state after step 1" in worker.coordinator.expect(NotSaved).reason
    assert saved.seconds.keys() == {"copy", "write"}
    store = CheckpointStore(tmp_path)
    checkpoint = store.commit(manifest(saved.groups, step=0, generation=1))
    np.testing.assert_array_equal(read_group(checkpoint, "layer-000")["params"], np.full(3, 0.5, np.float32))


def test_a_worker_that_cannot_restore_says_why_and_waits(tmp_path) -> None:
    with serving() as worker:
        absent = RestorePoint(folder=str(tmp_path / "step-000004-generation-1"), step=4)
        worker.coordinator.begin(1, step=5, restore=absent)
        failed = worker.coordinator.expect(RestoreFailed)
        assert (failed.generation, "manifest.json cannot be read: No such file" in failed.reason) == (1, True)
        assert not failed.may_be_intact
        worker.coordinator.send(Abandon(generation=1, reason="try an older one"))
        worker.coordinator.begin(2, step=0)
        assert worker.coordinator.expect(Vote).step == 0


def test_a_worker_that_cannot_read_a_checkpoint_says_that_it_may_be_intact(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: ObjectPath) -> bytes:
        raise ObjectStoreError(path, "not now")

    monkeypatch.setattr(ObjectPath, "read_bytes", refuse)
    with serving() as worker:
        away = RestorePoint(folder="s3://bucket/step-000004-generation-1", step=4)
        worker.coordinator.begin(1, step=5, restore=away)
        failed = worker.coordinator.expect(RestoreFailed)
        assert (failed.may_be_intact, "which may be intact" in failed.reason) == (True, True)


def test_a_worker_that_lost_a_peer_says_whom_and_waits() -> None:
    with serving() as worker:
        worker.tensors.loses_peer_in = 0
        worker.coordinator.begin(1, step=0)
        failed = worker.coordinator.expect(Failed)
        assert (failed.blames, failed.is_collateral) == (1, True)
        worker.tensors.loses_peer_in = None
        worker.coordinator.send(Abandon(generation=1, reason="node 1 is lost"))
        worker.coordinator.begin(2, step=0)
        assert np.isfinite(worker.coordinator.expect(Vote).loss_sum)


def test_a_worker_ends_with_its_agent() -> None:
    worker = Serving(lambda worker, moment, step: None)
    worker.coordinator.close()
    assert worker.end() == "the agent is gone"
