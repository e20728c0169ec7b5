"""The worker's end of the control channel: JSON lines over a socket that its agent holds the other end of."""

import queue
import socket
import threading
import traceback
from typing import Protocol

import msgspec

from oobleck_jax.elastic.messages import Abandon, Failed, Message, Stop, ToNode, decode_to_node, encode
from oobleck_jax.errors import Abandoned
from oobleck_jax.planning.plan import NodeId


_ERROR_CHARS = 1000
_TRACEBACK_CHARS = 16_000


class Control(Protocol):
    """What a worker needs of the coordinator.

    Attributes:
        abandoned: set when an `Abandon` or a `Stop` has come in and `receive` has not yet returned it.
    """

    abandoned: threading.Event

    def send(self, message: Message) -> None: ...

    def receive(self) -> ToNode:
        """Return the next message; `Stop` when the other side is gone."""
        ...


class SocketControl:
    """Control over a connected socket. A thread reads, so that an `Abandon` is seen while the worker computes."""

    def __init__(self, connected: socket.socket) -> None:
        self.abandoned = threading.Event()
        self._socket = connected
        self._sending = threading.Lock()
        self._counting = threading.Lock()
        self._num_undelivered = 0  # Abandon and Stop that wait in the inbox
        self._inbox: queue.Queue[ToNode] = queue.Queue()
        threading.Thread(target=self._read, name="control", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message; quietly does nothing when the agent is gone, since `receive` then says `Stop`."""
        try:
            with self._sending:
                self._socket.sendall(encode(message) + b"\n")
        except OSError:
            pass

    def receive(self) -> ToNode:
        """Return the next message. Waits as long as the agent lives: its end closes the socket."""
        message = self._inbox.get()
        if isinstance(message, Abandon | Stop):
            with self._counting:
                self._num_undelivered -= 1
                if not self._num_undelivered:
                    self.abandoned.clear()
        return message

    def _read(self) -> None:
        reason = "the agent is gone"
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    self._deliver(decode_to_node(line))
        except OSError:
            pass
        except msgspec.DecodeError as error:
            reason = f"the agent sent something that is no message: {error}"
        self._deliver(Stop(reason=reason))

    def _deliver(self, message: ToNode) -> None:
        if isinstance(message, Abandon | Stop):
            with self._counting:
                self._num_undelivered += 1
                self.abandoned.set()
        self._inbox.put(message)


def receive_or_abandon(control: Control) -> ToNode:
    """Return the next message.

    Raises:
        Abandoned: it is an `Abandon`.
    """
    message = control.receive()
    if isinstance(message, Abandon):
        raise Abandoned(message.reason)
    return message


def failure(node: NodeId, incarnation: int, generation: int, error: BaseException) -> Failed:
    """Return the message that tells of an error of this worker, and which node it waited for, if it did.

    XLA's errors can be very long: all of it is in the log, here are the beginning of the error and the traceback's end.
    """
    blames = getattr(error, "node", None)
    return Failed(
        node=node,
        incarnation=incarnation,
        generation=generation,
        error=f"{type(error).__name__}: {error}".splitlines()[0][:_ERROR_CHARS],
        traceback="".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:],
        blames=None if blames is None else NodeId(blames),
    )
