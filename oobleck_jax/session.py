"""One run of the coordinator: from the first agent to the summary."""

import asyncio
import hashlib
import json
import os
import platform
import secrets
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import msgspec

from models.presets import config_to_json
from oobleck_jax import events
from oobleck_jax.dashboard.wiring import actions_on, address_text, make_dashboard
from oobleck_jax.elastic.coordinator import Coordinator, Services
from oobleck_jax.elastic.effects import Finish
from oobleck_jax.elastic.membership import Membership
from oobleck_jax.elastic.messages import RunId
from oobleck_jax.elastic.resumption import Resumption
from oobleck_jax.elastic.terms import OnLoss, Proposal, Terms
from oobleck_jax.errors import RunFailed
from oobleck_jax.fabric_host import FabricHost, end_fabric_host
from oobleck_jax.foresight import Foresight
from oobleck_jax.inject import Kind
from oobleck_jax.launch import available_cores, place, place_at_start
from oobleck_jax.learning_rate import learning_rate
from oobleck_jax.local_agents import LocalAgents
from oobleck_jax.node_logs import NodeLogs, printable
from oobleck_jax.past_run import PastRun
from oobleck_jax.planning.plan import NodeId, Plan
from oobleck_jax.planning.reconfigure import get_ready
from oobleck_jax.progress import failure_text, format_duration, make_display, plan_table
from oobleck_jax.propose import layer_names
from oobleck_jax.setting import Setting
from oobleck_jax.summary import Summary
from oobleck_jax.tensorboard import Scalars


SIGNALS: Mapping[signal.Signals, tuple[str, int]] = {
    signal.SIGINT: ("interrupted (Ctrl-C)", 130),
    signal.SIGTERM: ("terminated (SIGTERM)", 143),
    signal.SIGHUP: ("the terminal is gone (SIGHUP)", 129),
}
_AGENTS_END_S = 1.0  # local agents end after the run; they have been told to, or have no coordinator any more
_LINGER_S = 2.0  # fabric services outlive the last worker that may be attached to them
_WATCH_S = 0.5  # between two looks at local agents that have not joined yet


def software_versions() -> dict[str, str]:
    """Return the versions that all nodes of a run must share."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python} | {name: version(name) for name in ("jax", "jaxlib", "oobleck-jax")}


def config_digest(config_json: str) -> str:
    return hashlib.sha256(config_json.encode()).hexdigest()[:16]


class Session:
    """Coordinates a run, writes its files, and shows it."""

    def __init__(self, setting: Setting) -> None:
        config = setting.config
        self._setting = setting
        self._config_json = config_to_json(setting.preset, config)
        self._on_loss = OnLoss.REGROUP if config.fault_tolerance else OnLoss.STOP
        self._cores = available_cores() if setting.is_local else ()
        self._agents = LocalAgents(setting.agents, log_path=setting.run_dir.log_path)
        self._fabric_host = FabricHost(
            linger_s=setting.orphan_s + _LINGER_S,
            log_path=setting.run_dir.path / "logs" / "fabric.log",
            environment=os.environ,
        )
        self._summary = Summary(tokens_per_step=config.tokens_per_step)
        self._logs = NodeLogs(socket.gethostname())
        self._display = make_display(
            num_nodes=config.nodes, steps=config.steps, tokens_per_step=config.tokens_per_step, logs=self._logs
        )
        past = setting.past
        self._files = events.RunFiles(
            setting.run_dir.path, goes_on_after=None if past is None else len(past.journal.decided)
        )
        self._contact = setting.contact
        self._foresight = Foresight(setting.proposer.replan)
        self._new_plan: Plan | None = None  # for whose losses it has not been planned yet
        self._dashboard = make_dashboard(setting)
        self._scalars = self._make_scalars() if setting.tensorboard else None
        self._joined: set[NodeId] = set()
        self._first_step_s: float | None = None
        self._is_interrupted = False

    def run(self, listener: socket.socket, tls: ssl.SSLContext | None) -> int:
        """Coordinate the run to its end; return the exit code."""
        setting = self._setting
        setting.run_dir.write_contact(setting.contact)
        if setting.past is None:
            self._show_plan()
            self._write_config()
            for node in setting.agents:
                setting.run_dir.log_path(node).write_bytes(b"")
            self.record(self._started())
        else:
            self._go_on(setting.past)
        try:
            end = asyncio.run(self._coordinate(listener, tls))
        except OSError as error:
            raise RunFailed(f"the coordinator cannot go on: {error}; see {setting.run_dir.path}") from error
        finally:
            self._agents.end(patience_s=_AGENTS_END_S * setting.patience)
            self._end_fabric_host_before()
            self._display.close()
            self._files.close()
            if self._scalars is not None:
                self._scalars.close()
        self._conclude(end)
        return end.exit_code

    def record(self, record: events.Record) -> None:
        """Take a record: into the files first, then into the summary and onto the screen."""
        self._files.write(record)
        self._summary.take(record)
        self._dashboard.take(record)
        if self._scalars is not None:
            self._scalars.take(record)
        match record:
            case events.Joined():
                self._joined.add(record.node)
                self._logs.take(record)
                if record.node in self._contact.agents and record.node not in self._agents.alive:
                    self._note_agents(but=record.node)  # somebody else has started the one that joined
            case events.Committed():
                self._files.write_metrics(self._metrics(record))
                self._inject(record.step)
                self._look_ahead()
            case events.Planned():
                self._new_plan = record.plan
            case events.Prepared() if self._first_step_s is None:
                self._first_step_s = time.monotonic()
                self._end_fabric_host_before()  # everybody has left it
            case _:
                pass
        if isinstance(record, events.Failed) and record is self._summary.failure and self._on_loss is OnLoss.STOP:
            self._display.close()  # the bar must not be drawn over the message
            _complain(failure_text(record, self._logs.where(record.node)))
        else:
            self._display.show(record)

    def _look_ahead(self) -> None:
        """After the first step of a generation: plan for the losses that may come, in a thread beside this one."""
        plan, self._new_plan = self._new_plan, None
        if plan is not None and self._on_loss is OnLoss.REGROUP:
            asyncio.get_running_loop().run_in_executor(None, self._foresight.foresee, plan)

    def _make_scalars(self) -> Scalars:
        config, past = self._setting.config, self._setting.past
        return Scalars(
            self._setting.run_dir.path / "tensorboard",
            tokens_per_step=config.tokens_per_step,
            learning_rate=partial(learning_rate, config),
            first_step=0 if past is None else past.journal.next_step,
        )

    def _inject(self, step: int) -> None:
        """Do what is to happen on purpose once a step is committed, before anybody is told."""
        for injection in self._setting.injections:
            match (injection.kind, injection.step):
                case (Kind.COORDINATOR, at_step) if at_step == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                case (Kind.JOIN, at_step) if at_step == step:
                    self._start_agents([self._agents.add()])
                case _:
                    pass

    def _started(self) -> events.Started:
        setting = self._setting
        return events.Started(
            preset=setting.preset,
            num_nodes=setting.config.nodes,
            fault_tolerance=setting.config.fault_tolerance,
            steps=setting.config.steps,
            config_digest=config_digest(self._config_json),
            versions=software_versions(),
        )

    def _go_on(self, past: PastRun) -> None:
        """Take up what has happened before; its failures are dealt with."""
        for _, committed in past.journal.decided[self._files.num_metrics :]:
            self._files.write_metrics(self._metrics(committed))
        for record in past.records:
            if not isinstance(record, events.Failed):
                self._summary.take(record)
        self._display.note(
            f"{self._setting.preset}: goes on after {past.journal.next_step} of {self._setting.config.steps} steps; "
            f"results in {self._setting.run_dir.path}\n{address_text(self._setting)}"
        )
        if past.is_open:
            return self._display.show(self._started())
        if past.differences:
            self._display.note(f"it goes on with other settings: {', '.join(past.differences)}")
            self._write_config()
        return self.record(self._started())

    def _write_config(self) -> None:
        (self._setting.run_dir.path / "config.json").write_text(self._config_json + "\n", encoding="utf-8")

    async def _coordinate(self, listener: socket.socket, tls: ssl.SSLContext | None) -> Finish:
        loop = asyncio.get_running_loop()
        services = Services(
            start_fabric=self._fabric_host.start_service,
            fabric_host=self._setting.fabric_host,
            listen_host=self._setting.listen_host,
            record=self.record,
            commit_checkpoint=partial(self._setting.checkpoints.commit, before=self._files.sync),
            clean_checkpoints=self._setting.checkpoints.clean,
            find_checkpoint=self._setting.checkpoints.find,
        )
        self._agents.adopt(self._setting.contact.agents)
        if self._setting.is_restore_due:  # what its workers have is of no use
            self._agents.end(patience_s=0.0)
        membership = Membership(self._terms(), loop.time(), resumed=self._resumption())
        coordinator = Coordinator(membership, services, token=self._setting.contact.token)
        # Before there is anything to leave behind.
        for number, (reason, exit_code) in SIGNALS.items():
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started with nohup
            loop.add_signal_handler(number, self._interrupt, coordinator, reason, exit_code)
        strangers = self._strangers()
        self._start_agents(self._setting.agents.keys() - strangers)
        if self._on_loss is OnLoss.REGROUP:
            loop.run_in_executor(None, get_ready)  # while the nodes come up
        watch = loop.create_task(self._watch_agents(coordinator, strangers))
        serve = partial(self._dashboard.serve, actions=actions_on(coordinator))
        try:
            return await coordinator.run(listener, tls=tls, serve=serve)
        finally:
            watch.cancel()
            self._fabric_host.end()

    def _interrupt(self, coordinator: Coordinator, reason: str, exit_code: int) -> None:
        if self._is_interrupted:  # again: the user has no patience left
            self._agents.end(patience_s=0.0)
            self._fabric_host.end()
            self._end_fabric_host_before()
            os._exit(exit_code)
        self._is_interrupted = True
        if self._setting.checkpoint_terms.at_end:
            self._display.note(f"{reason}: ends with this step and its checkpoint; once more: at once")
        coordinator.interrupt(reason, exit_code)

    def _end_fabric_host_before(self) -> None:
        if (process := self._setting.contact.fabric_host) is not None:
            end_fabric_host(process)

    def _start_agents(self, nodes: Iterable[NodeId]) -> None:
        """Start agents on this machine where there are none, and write down which processes there are."""
        self._agents.start(nodes, os.environ)
        self._note_agents()

    def _note_agents(self, *, but: NodeId | None = None) -> None:
        """Write down the agents that this coordinator, or one before, has started."""
        agents = {**self._contact.agents, **self._agents.process_ids()}
        self._contact = msgspec.structs.replace(
            self._contact,
            agents={node: process for node, process in agents.items() if node != but},
            fabric_host=self._fabric_host.process_id,
        )
        self._setting.run_dir.write_contact(self._contact)

    def _strangers(self) -> frozenset[NodeId]:
        """Return the nodes of a run that goes on whose agents somebody else has started: they look for us."""
        nodes = () if self._setting.past is None else self._setting.past.resumption.nodes
        return frozenset(node for node in nodes if node not in self._setting.contact.agents)

    def _resumption(self) -> Resumption | None:
        """Return where the run stands, if it goes on; whose agent is known to have ended need not be waited for."""
        setting = self._setting
        resumption = None if setting.past is None else setting.past.resumption
        if setting.is_restore_due:
            resumption = resumption or Resumption()
            # Folders of checkpoints have the generation in their names.
            last_generation = max(resumption.generation, setting.last_generation)
            return replace(resumption, generation=last_generation, is_restore_due=True)
        if resumption is None:
            return None
        gone = self._setting.contact.agents.keys() - self._agents.alive
        return replace(resumption, nodes=tuple(node for node in resumption.nodes if node not in gone))

    async def _watch_agents(self, coordinator: Coordinator, strangers: frozenset[NodeId]) -> None:
        """End the run if a local agent ends before it has joined; later, the coordinator sees its connection end."""
        started_again: set[NodeId] = set()
        patient_until_s = time.monotonic() + self._setting.limits.reattach_s
        while True:
            await asyncio.sleep(_WATCH_S)
            ended = self._setting.agents.keys() - self._agents.alive - self._joined
            if time.monotonic() < patient_until_s:
                ended -= strangers
            if ended and self._setting.past is None:
                return coordinator.interrupt(self._agents.why_ended(min(ended)), 1)
            if not self._is_interrupted and ended - started_again:  # they lived when we began, but did not come back
                self._start_agents(ended - started_again)
                started_again |= ended

    def _terms(self) -> Terms:
        setting, config = self._setting, self._setting.config
        return Terms(
            config_json=config_to_json(setting.preset, setting.proposer.config),
            run_id=RunId(secrets.token_hex(8)),
            config_digest=config_digest(self._config_json),
            versions=software_versions(),
            num_nodes=config.nodes,
            max_nodes=setting.max_nodes,
            num_devices=config.devices_per_node,
            num_layers=config.model.num_layers,
            steps=config.steps,
            tokens_per_step=config.tokens_per_step,
            evaluates_after=config.evaluates_after,
            replan=self._replan,
            ahead=setting.proposer.ahead,
            faults_of=self._faults_of,
            place=partial(place, cores=self._cores),
            place_at_start=partial(place_at_start, num_nodes=config.nodes, cores=self._cores),
            on_loss=self._on_loss,
            max_skipped=config.skip_steps,
            limits=setting.limits,
            checkpoints=setting.checkpoint_terms,
        )

    def _faults_of(self, node: NodeId) -> tuple[str, ...]:
        return tuple(str(injection) for injection in self._setting.injections if injection.node == node)

    def _replan(
        self, nodes: tuple[NodeId, ...], holdings: Mapping[NodeId, tuple[int, ...]], old: Plan | None
    ) -> Proposal:
        began_s = time.perf_counter()
        proposal = self._foresight.replan(nodes, holdings, old)
        return replace(proposal, plan_s=time.perf_counter() - began_s)

    def _metrics(self, committed: events.Committed) -> events.StepMetrics:
        config, step = self._setting.config, committed.step
        return events.StepMetrics(
            step=step,
            generation=committed.generation,
            loss=committed.loss,
            grad_norm=committed.grad_norm,
            learning_rate=learning_rate(config, step),
            tokens_per_s=config.tokens_per_step / committed.step_time_s,
            step_time_s=committed.step_time_s,
            sample_first=step * config.global_batch_size,
            sample_end=(step + 1) * config.global_batch_size,
        )

    def _show_plan(self) -> None:
        proposal, config = self._setting.proposal, self._setting.config
        cores = place(proposal.plan, cores=self._cores)
        table = plan_table(proposal.plan, names=layer_names(self._setting.proposer.profile), cores=cores)
        self._display.note(
            f"{self._setting.preset}: {config.steps} steps of {config.tokens_per_step:,} tokens, "
            f"{config.num_microbatches} microbatches; results in {self._setting.run_dir.path}\n"
            f"{address_text(self._setting)}\n"
            f"plan: {proposal.reason}\n{table}"
        )

    def _conclude(self, end: Finish) -> None:
        now_s, began_s = time.monotonic(), self._setting.began_s
        start_up_s = None if self._first_step_s is None else self._first_step_s - began_s
        summary = self._summary.to_dict(end, seconds=now_s - began_s, start_up_s=start_up_s)
        if self._setting.summary_path is not None:
            self._setting.summary_path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        steps = f"{summary['steps']} of {self._setting.config.steps} steps"
        if end.exit_code:
            is_told = self._summary.failure is not None and self._on_loss is OnLoss.STOP
            reason = "" if is_told else f": {end.reason}"
            return _complain(f"stopped after {steps}{reason}; see {self._setting.run_dir.path}")
        skipped = f"{summary['skipped_steps']} steps skipped, " if summary["skipped_steps"] else ""
        eval_loss = f"evaluation loss {summary['eval_loss']:.4f}, " if summary["eval_loss"] is not None else ""
        results = ""
        if summary["final_loss"] is not None:
            rate = f"{summary['median_tokens_per_s']:,.0f} tokens/s (median)"
            results = f", loss {summary['final_loss']:.4f}, {eval_loss}{skipped}{rate}"
        return self._display.note(
            f"done: {steps} in {format_duration(summary['seconds'])}{results}; results in {self._setting.run_dir.path}"
        )


def _complain(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)  # noqa: T201
