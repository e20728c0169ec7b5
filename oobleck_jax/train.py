"""Train a model on several nodes, on this machine or on many, in pipelines that share the work.

Everything is checked before a process starts. This process coordinates and never imports jax: agents and workers are
processes of their own.
"""

import asyncio
import io
import os
import secrets
import signal
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from models.gpt import GptConfig
from models.presets import config_to_json
from oobleck_jax.checkpoint.store import CheckpointStore
from oobleck_jax.choose_remat import choose_remat
from oobleck_jax.cluster import ProcessPlace, find_place
from oobleck_jax.config import Remat, RunConfig, check_config, flag
from oobleck_jax.data import check_data
from oobleck_jax.elastic.agent import WORKER_COMMAND, AgentOptions, run_agent
from oobleck_jax.elastic.coordinator import LOOPBACK, bind, check_exposure
from oobleck_jax.elastic.limits import Limits
from oobleck_jax.errors import ConfigError, RunFailed
from oobleck_jax.inject import check_injections, parse_injections
from oobleck_jax.launch import available_cores
from oobleck_jax.measured_profile import (
    ESTIMATE,
    LIMIT_S,
    Place,
    Profiler,
    cache_folder,
    place_of,
    read_profile,
)
from oobleck_jax.node_logs import printable
from oobleck_jax.options import ClusterOptions, CommandLine, parse_command_line, read_token
from oobleck_jax.past_run import PastRun, read_past
from oobleck_jax.planning.plan import NodeId
from oobleck_jax.planning.profile import Profile
from oobleck_jax.propose import estimated_profile, make_proposer, memory_per_device, schedule_text
from oobleck_jax.run_checkpoints import RunCheckpoints, checkpoint_folder, checkpoint_terms, link_checkpoints
from oobleck_jax.run_dir import Contact, RunDir, make_log_dir, read_contact
from oobleck_jax.session import SIGNALS, Session, config_digest, software_versions
from oobleck_jax.setting import Setting
from oobleck_jax.tensorboard import check_tensorboard


# Where nodes share cores, a worker that starts (2 s and more of compute) would double the time of the step that the
# others redo meanwhile.
_YIELD_S = 10.0


def main(
    arguments: Sequence[str],
    *,
    program: str = "train.py",
    has_nodes: bool = True,
    worker_command: tuple[str, ...] = WORKER_COMMAND,
) -> int:
    """Run the command line; return its exit code.

    Args:
        arguments: the flags.
        program: how the user called it.
        has_nodes: whether there are nodes on this machine; if not, it only coordinates.
        worker_command: the program of the workers.
    """
    # The C++ side of jaxlib, which hosts the coordination service, would log into the display.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what workers write may have characters that the terminal lacks
    try:
        description = (__doc__ or "").partition("\n")[0]
        line = parse_command_line(arguments, program=program, description=description)
        return _run(line, has_nodes=has_nodes, worker_command=worker_command)
    except (ConfigError, RunFailed) as error:
        print(printable(f"{program}: {error}"), file=sys.stderr)  # noqa: T201
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return SIGNALS[signal.SIGINT][1]


def _run(line: CommandLine, *, has_nodes: bool, worker_command: tuple[str, ...]) -> int:
    began_s = time.monotonic()
    if line.run.patience <= 0:
        raise ConfigError(f"--patience is {line.run.patience}; it must be positive")
    for name in ("forgive_minutes", "wait_minutes"):
        if getattr(line.run, name) < 0:
            raise ConfigError(f"{flag(name)} is {getattr(line.run, name)}; it must not be negative")
    if line.run.keep < 1:
        raise ConfigError(f"--keep is {line.run.keep}; it must be at least 1")
    if line.run.tensorboard:
        check_tensorboard()
    token = read_token(line.cluster)
    _check_authority(line.cluster.tls_authority)
    nodes = _Nodes(line=line, token=token, worker_command=worker_command)
    if line.run.orphan_minutes < 0:
        raise ConfigError(f"--orphan-minutes is {line.run.orphan_minutes}; it must not be negative")
    if line.cluster.join is not None:
        return asyncio.run(run_agent(nodes.joining(line.cluster.join)))
    process = _find_process(line, has_nodes=has_nodes)
    config = line.config if process is None else replace(line.config, nodes=process.num_processes)
    check_config(config)
    if process is not None and process.process_id > 0:
        node = NodeId(process.process_id)
        address = f"{process.host}:{process.port}"
        return asyncio.run(
            run_agent(nodes.agent(address, config=config, node=node, log_dir=make_log_dir(line.run.run_dir)))
        )

    run_path = line.run.run_dir or _default_run_dir(line.run.preset)
    store = CheckpointStore(checkpoint_folder(line.run.checkpoint_dir, run_path))
    terms = checkpoint_terms(line.run.checkpoint_every, store)
    check_data(config)
    _check_pretrained(config)
    num_local = (config.nodes if process is None else 1) if has_nodes else 0
    memory_gib = line.run.device_memory_gib
    memory_bytes = (
        int(memory_gib * 2**30)
        if memory_gib is not None
        else memory_per_device(config.devices_per_node * max(num_local, 1))
    )
    max_nodes = config.nodes if line.run.max_nodes is None else line.run.max_nodes
    if max_nodes < config.nodes:
        raise ConfigError(f"--max-nodes {max_nodes} is less than the {config.nodes} nodes to begin with")
    shares_cores = len(available_cores()) < num_local
    proposer = make_proposer(
        config,
        plan=line.run.plan,
        device_memory_bytes=memory_bytes,
        max_nodes=max_nodes,
        shares_cores=shares_cores,
    )
    proposer.check()
    injections = parse_injections(line.run.inject)
    check_injections(injections, num_nodes=max_nodes, steps=config.steps, is_local=process is None)
    host = "127.0.0.1" if process is None else process.host
    listen_host = host if host in LOOPBACK else "0.0.0.0"
    check_exposure(listen_host, token)
    tls = _server_tls(line.cluster)
    place = place_of(num_nodes=config.nodes, cores=available_cores() if process is None else ())
    why_remat = ""
    if config.remat is Remat.AUTO:
        if line.run.profile not in (None, ESTIMATE):
            raise ConfigError(
                f"--remat auto compares what policies cost, but --profile {line.run.profile} is of one; name the "
                f"policy, or give --profile {ESTIMATE}, or none"
            )
        proposer, why_remat = choose_remat(
            proposer, lambda remat: _profile(line, replace(config, remat=remat), place, has_nodes=has_nodes)
        )
    elif line.run.profile is not None or proposer.needs_costs:
        proposer = replace(proposer, profile=_profile(line, config, place, has_nodes=has_nodes))
    proposal = proposer.first()
    if why_remat:
        proposal = replace(proposal, reason=f"{proposal.reason}; {why_remat}")
    if line.run.print_schedule:
        print(schedule_text(proposal.plan, proposer.profile))  # noqa: T201
        return 0

    if line.run.summary_json is not None:
        line.run.summary_json.parent.mkdir(parents=True, exist_ok=True)
    limits = Limits(
        forgive_s=60.0 * line.run.forgive_minutes,
        wait_s=60.0 * line.run.wait_minutes,
        yield_s=_YIELD_S if shares_cores else 0.0,
    ).scaled(line.run.patience)
    with RunDir(run_path) as run_dir:
        config_json, versions = config_to_json(line.run.preset, config), software_versions()
        past = read_past(run_dir.path, config_json=config_json, versions=versions)
        checkpoints = RunCheckpoints(
            store,
            config=config,
            config_json=config_json,
            versions=versions,
            keep=line.run.keep,
            find_s=limits.find_s,
        )
        is_restore_due, last_generation = False, 0
        if past is None or not past.is_open or not past.resumption.generation:  # no worker has a state
            newest, last_generation = checkpoints.start()
            is_restore_due = newest is not None
        link_checkpoints(run_dir.path, store)
        if past is not None and not past.is_open:
            if (complete := _why_complete(past, config)) and (is_restore_due or not past.differences):
                print(f"{complete}; results in {run_dir.path}")  # noqa: T201
                return 0
            if not is_restore_due:
                raise ConfigError(past.why_not(run_dir.path))
        before = None if past is None else read_contact(run_dir.path)
        if process is None and token is None:
            # Nobody else on this machine takes part by accident.
            token = secrets.token_hex() if before is None else before.token
        port = line.cluster.port if process is None else process.port
        if not port and before is not None:
            port = int(before.address.rpartition(":")[2])  # where the agents look for us
        with bind(listen_host, port) as listener:
            nodes = replace(nodes, token=token)
            contact = Contact(
                address=f"{host}:{listener.getsockname()[1]}",
                token=token,
                tls_authority=nodes.tls_authority,
                pid=os.getpid(),
                agents={} if before is None else before.agents,
                fabric_host=None if before is None else before.fabric_host,
            )
            agents = {
                node: nodes.agent(contact.address, config=config, node=node, log_dir=run_dir.path / "logs")
                for node in map(NodeId, range(num_local))
            }
            setting = Setting(
                injections=injections,
                preset=line.run.preset,
                config=config,
                proposer=proposer,
                proposal=proposal,
                run_dir=run_dir,
                fabric_host=host,
                listen_host=listen_host,
                is_local=process is None,
                max_nodes=max_nodes,
                agents=agents,
                contact=contact,
                limits=limits,
                patience=line.run.patience,
                orphan_s=nodes.orphan_s,
                summary_path=line.run.summary_json,
                began_s=began_s,
                tensorboard=line.run.tensorboard,
                checkpoints=checkpoints,
                checkpoint_terms=terms,
                past=past,
                is_restore_due=is_restore_due,
                last_generation=last_generation,
            )
            return Session(setting).run(listener, tls)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Nodes:
    """How this machine's nodes are made."""

    line: CommandLine
    token: str | None
    worker_command: tuple[str, ...]

    @property
    def tls_authority(self) -> str | None:
        """File of the certificates to trust; one that signs itself is its own authority."""
        authority = self.line.cluster.tls_authority or self.line.cluster.tls_certificate
        return None if authority is None else str(authority.resolve())

    @property
    def orphan_s(self) -> float:
        return 60.0 * self.line.run.orphan_minutes * self.line.run.patience

    def joining(self, where: str) -> AgentOptions:
        """Return the options of an agent that joins a run as one more node.

        Args:
            where: host:port of the coordinator, or its run directory on this machine.
        """
        config = self.line.config
        if not Path(where).is_dir():
            return self.agent(where, config=config, node=None, log_dir=make_log_dir(self.line.run.run_dir))
        contact = read_contact(Path(where))
        if contact is None:
            raise ConfigError(f"--join {where}: there is no run in this directory")
        options = self.agent(contact.address, config=config, node=None, log_dir=Path(where).resolve() / "logs")
        return msgspec.structs.replace(
            options,
            token=self.token or contact.token,
            tls_authority=self.tls_authority or contact.tls_authority,
        )

    def agent(self, address: str, *, config: RunConfig, node: NodeId | None, log_dir: Path | None) -> AgentOptions:
        """Return the options of an agent that joins the coordinator at `address`.

        Args:
            address: host:port.
            config: this process's own; must be the coordinator's unless the node joins without an id.
            node: the id to ask for; None: any.
            log_dir: where the output of its worker goes; None: where this process's goes.
        """
        run = self.line.run
        host_name = socket.gethostname()
        return AgentOptions(
            coordinator_address=address,
            name=host_name,
            versions=software_versions(),
            node=node,
            num_devices=config.devices_per_node,
            config_digest=None if node is None else config_digest(config_to_json(run.preset, config)),
            token=self.token,
            tls_authority=self.tls_authority,
            worker_command=self.worker_command,
            log_dir=None if log_dir is None else str(log_dir),
            trace_dir=self._trace_dir(log_dir),
            compilation_cache=str(run.compilation_cache or cache_folder()),
            connect_s=60.0 * run.patience,
            silence_s=20.0 * run.patience,
            orphan_s=self.orphan_s,
            leave_s=25.0 * run.patience,
            worker_stop_s=1.5 * run.patience,
        )

    def _trace_dir(self, log_dir: Path | None) -> str | None:
        """Return where a node's worker writes its trace: beside its logs."""
        if not self.line.run.trace:
            return None
        if log_dir is None:
            raise ConfigError("--trace needs --run-dir on every host: the trace of its node goes there")
        return str(log_dir.parent.resolve() / "trace")


def _why_complete(past: PastRun, config: RunConfig) -> str | None:
    """Say that a run is complete, if it is and shall not get longer."""
    finished = past.finished
    if finished is None or finished.exit_code or past.journal.next_step < config.steps:
        return None
    return f"this run is complete: {finished.reason}"


def _check_pretrained(config: RunConfig) -> None:
    """Refuse a model to begin with that is missing, or another one."""
    if config.init_from is None:
        return
    if not isinstance(config.model, GptConfig):
        raise ConfigError(f"--init-from {config.init_from}: only a GPT can begin with the parameters of a GPT-2")
    from oobleck_jax.huggingface import PretrainedGpt  # late: most runs do not need it

    PretrainedGpt(Path(config.init_from), config.model)


def _profile(line: CommandLine, config: RunConfig, place: Place, *, has_nodes: bool) -> Profile:
    """Return the costs to plan with: those that the user gives, else measured ones where there are nodes."""
    if line.run.profile == ESTIMATE or (line.run.profile is None and not has_nodes):
        return estimated_profile(config)
    if line.run.profile is not None:
        return read_profile(Path(line.run.profile), config)
    profiler = Profiler(
        compilation_cache=line.run.compilation_cache or cache_folder(),
        place=place,
        versions=software_versions(),
        limit_s=LIMIT_S * line.run.patience,
        say=lambda text: print(text, file=sys.stderr, flush=True),  # noqa: T201
    )
    return profiler.profile(line.run.preset, config)


def _find_process(line: CommandLine, *, has_nodes: bool) -> ProcessPlace | None:
    cluster = line.cluster
    if has_nodes:
        return find_place(cluster.coordinator_address, cluster.num_processes, cluster.process_id, os.environ)
    if cluster.coordinator_address is None:
        raise ConfigError("a coordinator without nodes needs --coordinator-address HOST:PORT, where nodes --join it")
    return find_place(cluster.coordinator_address, line.config.nodes, 0, os.environ)


def _check_authority(authority: Path | None) -> None:
    """Refuse a file that has no certificate to trust."""
    if authority is None:
        return
    try:
        ssl.create_default_context(cafile=authority)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-authority {authority} has no certificate to trust: {error}") from None


def _server_tls(cluster: ClusterOptions) -> ssl.SSLContext | None:
    """Return what the coordinator serves TLS with, if a certificate is given."""
    if cluster.tls_certificate is None:
        if cluster.tls_key is not None:
            raise ConfigError("--tls-key is given without --tls-certificate")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cluster.tls_certificate, cluster.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-certificate {cluster.tls_certificate} cannot be used: {error}") from None
    return context


def _default_run_dir(preset: str) -> Path:
    name = Path(preset.partition(":")[0]).stem if ":" in preset else preset
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
