"""The nodes that take part, by id and by connection; how they come, are replaced, and go."""

from collections.abc import Iterator

from oobleck_jax import events
from oobleck_jax.elastic import messages
from oobleck_jax.elastic.admission import free_node, why_refuse
from oobleck_jax.elastic.effects import Close, ConnectionId
from oobleck_jax.elastic.failures import Failures
from oobleck_jax.elastic.node import Awaited, Node, NodeState, first_deadline
from oobleck_jax.elastic.outbox import Outbox
from oobleck_jax.elastic.terms import Terms
from oobleck_jax.planning.plan import NodeId, Stage


class Roster:
    """Who takes part. Decides nothing about the run; writes what it does to nodes into the outbox.

    A node that was told to go is off the roster at once, but not its connection: the end of its worker, and of the
    connection, are expected then.
    """

    def __init__(self, terms: Terms, out: Outbox) -> None:
        self._terms = terms
        self._out = out
        self._nodes: dict[NodeId, Node] = {}
        self._by_connection: dict[ConnectionId, Node] = {}
        self._departing: dict[ConnectionId, Node] = {}
        self._failures: dict[NodeId, Failures] = {}
        self._excluded: dict[NodeId, str] = {}  # and why

    def __iter__(self) -> Iterator[Node]:
        """Yield the nodes, in the order in which they came."""
        return iter(tuple(self._nodes.values()))

    def get(self, node: NodeId | None) -> Node | None:
        return None if node is None else self._nodes.get(node)

    def ready(self) -> tuple[Node, ...]:
        """Return the nodes that can take part in a plan, ascending: their workers are ready, and they stay."""
        nodes = [node for node in self if node.is_ready and node.leaves is None]
        return tuple(sorted(nodes, key=lambda node: node.node))

    def leaving(self) -> tuple[Node, ...]:
        """Return the nodes that have been asked to leave, ascending."""
        return tuple(sorted((node for node in self if node.leaves is not None), key=lambda node: node.node))

    @property
    def ids(self) -> tuple[NodeId, ...]:
        return tuple(sorted(self._nodes))

    @property
    def holdings(self) -> dict[NodeId, tuple[int, ...]]:
        """The layers whose state after the last commit each node has."""
        return {node.node: node.holds for node in self if node.holds}

    @property
    def connections(self) -> tuple[ConnectionId, ...]:
        """The open connections of nodes that take part."""
        return tuple(self._by_connection)

    def first_deadline(self) -> tuple[float, Node, Awaited] | None:
        """Return when the first wait for a node ends, which node that is, and what for; None: there are no nodes."""
        waits = ((first_deadline(node, self._terms.limits), node) for node in self)
        first = min(waits, key=lambda item: item[0][0], default=None)
        return None if first is None else (first[0][0], first[1], first[0][1])

    # ------------------------------------------------------------------------------------------------------ coming

    def admit(
        self, connection: ConnectionId, join: messages.Join, *, has_begun: bool, is_over: bool, now_s: float
    ) -> Node | None:
        """Take a node in, or tell it why not. An agent that comes again may replace its old connection."""
        if connection in self._by_connection:
            self._out.ignore(f"{join.name} joined twice on one connection")
            return None
        old = self.get(join.node)
        if old is not None and join.worker is None and join.agent != (old.agent or None):
            old = None  # another agent, with a node of its own
        taken = [node for node in self._nodes if old is None or node != old.node]
        reason = "it comes too late: the run is over" if is_over else None
        reason = reason or why_refuse(join, self._terms, taken=taken, excluded=self._excluded, has_begun=has_begun)
        if reason is None and join.worker is not None and join.worker.node != join.node:
            reason = f"{join.name} has the worker of node {join.worker.node}, but joins as node {join.node}"
        if reason:
            self._out.write(events.Rejected(name=join.name, reason=reason))
            self._out.send(connection, messages.Refused(reason=reason))
            self._out.do(Close(connection=connection))
            return None
        if old is not None:
            self.remove(old)
            self._by_connection.pop(old.connection, None)
            self._out.do(Close(connection=old.connection))
        number = join.node
        if number is None:
            number = free_node(self._terms, taken=taken, excluded=self._excluded)
        assert number is not None
        node = Node(
            node=number,
            name=join.name,
            connection=connection,
            incarnation=join.incarnation if join.worker is None else join.worker.incarnation,
            heard_s=now_s,
            since_s=now_s,
            agent=join.agent,
        )
        self._nodes[number] = self._by_connection[connection] = node
        self._out.write(events.Joined(node=number, name=join.name, incarnation=node.incarnation, log_dir=join.log_dir))
        is_first = join.incarnation == 0 and join.worker is None
        self._welcome(node, is_first=is_first, ahead=self._terms.ahead if has_begun else ())
        if join.worker is not None:
            self.make_ready(node, join.worker, now_s)
        return node

    def _welcome(self, node: Node, *, is_first: bool, ahead: tuple[Stage, ...]) -> None:
        cores, num_threads = self._terms.place_at_start(node.node)
        welcome = messages.Welcome(
            node=node.node,
            config_json=self._terms.config_json,
            cores=cores,
            num_threads=num_threads,
            run_id=self._terms.run_id,
            faults=self._terms.faults_of(node.node) if is_first else (),
            ahead=ahead,
        )
        self._out.send(node.connection, welcome)

    def make_ready(self, node: Node, ready: messages.WorkerReady, now_s: float) -> None:
        """Take note that the worker of a node waits for a plan."""
        self._out.write(
            events.Ready(
                node=node.node,
                incarnation=ready.incarnation,
                device_kind=ready.device_kind,
                num_devices=ready.num_devices,
                seconds=max(now_s - node.since_s, 0.0),
            )
        )
        node.link_address = ready.link_address
        node.ready_s = now_s
        node.enter(NodeState.IDLE, now_s)

    # ----------------------------------------------------------------------------------------------------- hearing

    def hear(self, connection: ConnectionId, message: messages.ToCoordinator, now_s: float) -> Node | None:
        """Return the node that a message is from; None when the message has no consequence."""
        node = self._by_connection.get(connection)
        kind = type(message).__name__
        if node is None:
            departing = self._departing.get(connection)
            if departing is not None and isinstance(message, messages.WorkerExited):
                self.record_exit(message)
            else:
                self._out.ignore(f"{kind} on a connection that takes no part (any more)")
            return None
        if message.node != node.node:
            self._out.ignore(f"node {node.node} sent a {kind} in the name of node {message.node}")
            return None
        node.heard_s = now_s
        if isinstance(message, messages.Heartbeat):
            since_s = now_s if node.stopped_since_s is None else node.stopped_since_s
            node.stopped_since_s = since_s if message.is_worker_stopped else None
        return node

    def record_exit(self, exited: messages.WorkerExited) -> None:
        if not exited.is_gone:
            return  # it is told once more
        self._out.write(
            events.Left(
                node=exited.node,
                exit_code=exited.exit_code,
                peak_memory_bytes=exited.peak_memory_bytes,
                agent_peak_memory_bytes=exited.agent_peak_memory_bytes,
            )
        )

    # ------------------------------------------------------------------------------------------------------- going

    def respawn(self, node: Node, reason: str, now_s: float, *, has_begun: bool, yield_s: float) -> None:
        """Have the worker of a node replaced; a node whose workers fail again and again is excluded.

        Args:
            has_begun: whether the first generation has begun.
            yield_s: how long the new worker leaves the cores to those that recover.
        """
        limits = self._terms.limits
        failures = self._failures.setdefault(node.node, Failures())
        failures.add(ready_s=node.ready_s, limits=limits, now_s=now_s)
        if why := failures.why_exclude(node.node, limits):
            self._excluded[node.node] = why
            self._out.write(events.Rejected(name=node.name, reason=f"{why}; the last: {reason}"))
            return self.dismiss(node, f"{why}; the last: {reason}", exit_code=1)
        delay_s = max(failures.delay_s(limits), yield_s)
        node.incarnation += 1
        node.enter(NodeState.STARTING, now_s + delay_s)
        node.ready_s = node.stopped_since_s = None
        node.link_address, node.holds = "", ()
        self._out.write(events.Respawned(node=node.node, incarnation=node.incarnation, delay_s=delay_s, reason=reason))
        ahead = self._terms.ahead if has_begun else ()
        respawn = messages.Respawn(incarnation=node.incarnation, delay_s=delay_s, reason=reason, ahead=ahead)
        return self._out.send(node.connection, respawn)

    def dismiss(self, node: Node, reason: str, *, exit_code: int) -> None:
        """Tell a node to go."""
        self.remove(node)
        if self._by_connection.pop(node.connection, None) is not None:
            self._departing[node.connection] = node
            self._out.send(node.connection, messages.Stop(reason=reason, exit_code=exit_code))

    def why_nobody_can_come(self) -> str | None:
        """Return why the run has no node and never will, or None when there may be one."""
        if self._nodes or free_node(self._terms, taken=(), excluded=self._excluded) is not None:
            return None
        return "; ".join(why for _, why in sorted(self._excluded.items()))

    def release(self, node: Node) -> None:
        """Let a node go that was asked to leave."""
        self.dismiss(node, f"node {node.node} leaves ({node.leaves})", exit_code=0)

    def cut_off(self, node: Node, reason: str) -> None:
        """Tell a node to go that probably does not hear it any more."""
        self.dismiss(node, f"excluded: {reason}", exit_code=1)
        if self._departing.pop(node.connection, None) is not None:
            self._out.do(Close(connection=node.connection))

    def disconnect(self, connection: ConnectionId) -> Node | None:
        """Forget a connection that has ended; return the node, still on the roster, for which this is a loss."""
        self._departing.pop(connection, None)
        return self._by_connection.pop(connection, None)

    def remove(self, node: Node) -> None:
        """Take a node off the roster."""
        if self._nodes.get(node.node) is node:
            del self._nodes[node.node]
