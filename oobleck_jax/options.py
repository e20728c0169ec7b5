"""The command line: a preset, and a typed flag for everything that it decides."""

import argparse
import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from models.presets import PRESETS, load_preset
from oobleck_jax.config import WHY_NOT_FLOAT16, OptimizerConfig, RunConfig
from oobleck_jax.errors import ConfigError


DEFAULT_PRESET = "gpt-laptop"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How to run, and where the results go: nothing here changes what is computed."""

    preset: str = DEFAULT_PRESET  # decides the defaults of all flags below "training": {presets}, or FILE.py:FUNCTION
    run_dir: Path | None = None  # folder of the results (default: runs/PRESET-DATE-TIME); goes on with a run in it
    plan: str | None = None  # use this plan: a JSON file, or a line such as "0-5,5-10 | 0-10" (layers of each stage)
    profile: str | None = None  # costs to plan with: a file of scripts/profile.py, or "estimate" (default: measure)
    print_schedule: bool = False  # print the schedule of each pipeline, and run nothing
    summary_json: Path | None = None  # write a summary of the run into this file
    device_memory_gib: float | None = (
        None  # memory of a device, to plan with (default: shares of this machine's memory)
    )
    checkpoint_every: str | None = None  # steps (20) or minutes (5m) between checkpoints; 0: none (default: at the end)
    checkpoint_dir: str | None = (
        None  # where they are: all nodes must see it; may be gs://, s3:// (default: checkpoints/ in the run's folder)
    )
    keep: int = 3  # checkpoints to keep
    max_nodes: int | None = None  # the most nodes there can be, with those that join later (default: --nodes)
    orphan_minutes: float = 1.0  # nodes keep their state so long when the coordinator dies, and wait for the next one
    wait_minutes: float = 30.0  # a run that has too few nodes waits so long for others
    compilation_cache: Path | None = None  # folder of compiled programs (default: ~/.cache/oobleck_jax/HOST)
    inject: str = ""  # let something fail on purpose: "kill:2@10:backward,join@20,coordinator@30" (inject.py lists all)
    forgive_minutes: float = 3.0  # a worker that ran so long makes up for the failures of its node; 5 exclude a node
    tensorboard: bool = False  # write scalars for TensorBoard into RUN_DIR/tensorboard
    trace: bool = False  # write what every node did when into RUN_DIR/trace, for scripts/timeline.py
    patience: float = 1.0  # multiplies every time limit: raise it on machines that are slow or shared


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """Several hosts: start the same command on each of them; process 0 coordinates. Without these, all runs here."""

    coordinator_address: str | None = None  # HOST:PORT of process 0; "auto" asks Slurm, Open MPI or Kubernetes
    num_processes: int | None = None  # hosts; each is a node
    process_id: int | None = None  # of this host, from 0
    join: str | None = None  # HOST:PORT of a coordinator, or its run directory: be one of its nodes, at any time
    port: int = 0  # where the coordinator listens when all runs on this machine; 0: any free port
    token: str | None = None  # secret that all nodes share; needed on any address but loopback
    token_file: Path | None = None  # file that contains the token
    tls_certificate: Path | None = None  # of the coordinator; turns TLS on (process 0)
    tls_key: Path | None = None  # of the certificate (process 0)
    tls_authority: Path | None = None  # certificates to trust; turns TLS on (all processes)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandLine:
    """What the user asked for."""

    run: RunOptions
    cluster: ClusterOptions
    config: RunConfig


def parse_command_line(arguments: Sequence[str], *, program: str, description: str) -> CommandLine:
    """Parse the flags; what they leave open comes from the preset.

    Prints help or what is wrong, and exits, as command lines do.

    Raises:
        ConfigError: an unknown preset, or a value that its model refuses.
    """
    preset = _preset_of(arguments)
    config = load_preset(preset)
    nested = {"model", "optimizer"}
    training = {item.name: getattr(config, item.name) for item in fields(RunConfig) if item.name not in nested}
    groups: dict[str, tuple[type, dict[str, Any]]] = {
        "run": (RunOptions, {"preset": preset}),
        "cluster": (ClusterOptions, {}),
        "training": (RunConfig, training),
        "optimizer": (OptimizerConfig, _values(config.optimizer)),
        "model": (type(config.model), _values(config.model)),
    }
    flags: Any = make_dataclass(
        "Flags", [(name, _flags(name, base, values, nested)) for name, (base, values) in groups.items()], kw_only=True
    )
    parsed = tyro.cli(
        flags,
        prog=program,
        description=description,
        args=list(arguments),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.EnumChoicesFromValues),
    )
    return CommandLine(
        run=RunOptions(**_values(parsed.run)),
        cluster=ClusterOptions(**_values(parsed.cluster)),
        config=RunConfig(
            model=type(config.model)(**_values(parsed.model)),
            optimizer=OptimizerConfig(**_values(parsed.optimizer)),
            **_values(parsed.training),
        ),
    )


def _preset_of(arguments: Sequence[str]) -> str:
    """Find the preset before the rest can be parsed: it decides which flags there are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--preset", default=DEFAULT_PRESET)
    parser.add_argument("--precision", nargs="?")
    try:
        found = parser.parse_known_args(list(arguments))[0]
    except argparse.ArgumentError:
        raise ConfigError(f"--preset needs a name: {', '.join(PRESETS)}, or FILE.py:FUNCTION") from None
    if found.precision == "float16":
        raise ConfigError(WHY_NOT_FLOAT16)
    return found.preset


def _flags(name: str, base: type, values: dict[str, Any], nested: set[str]) -> type:
    """Return a class with the plain fields of `base`, these defaults, and the comments beside the fields as help."""
    comments = _comments(base)
    hints = get_type_hints(base)
    made: list[tuple[str, Any, Any]] = []
    for item in fields(base):
        if item.name in nested or not item.init:
            continue
        default = values.get(item.name, _default(item))
        text = comments.get(item.name, "").replace("{presets}", ", ".join(PRESETS))
        argument = tyro.conf.arg(
            help=text,
            metavar=_metavar(hints[item.name]),
            help_behavior_hint="" if default is None else None,  # the text says what happens without
        )
        hint: Any = Annotated[hints[item.name], argument]
        if base is RunOptions:
            hint = tyro.conf.FlagCreatePairsOff[hint]
        made.append((item.name, hint, field(default=default)))
    flags = make_dataclass(name.capitalize(), made, kw_only=True, frozen=True)
    flags.__doc__ = inspect.getdoc(base) or ""
    return flags


def _default(item: "Field[Any]") -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def _comments(base: type) -> dict[str, str]:
    """Return the trailing comment of each field."""
    try:
        source = inspect.getsource(base)
    except OSError:
        return {}
    return {match[1]: match[2] for match in re.finditer(r"^    (\w+): .*?  # (.*)$", source, re.MULTILINE)}


def _metavar(hint: Any) -> str | None:
    if hint == Path | None:
        return "PATH"
    if hint in (str, str | None):
        return "TEXT"
    return {int | None: "INT", float | None: "FLOAT"}.get(hint)


def _values(value: Any) -> dict[str, Any]:
    assert is_dataclass(value)
    return {item.name: getattr(value, item.name) for item in fields(value) if item.init}


def read_token(options: ClusterOptions) -> str | None:
    """Return the token, if one is given.

    Raises:
        ConfigError: two are given, or the file cannot be read, or is empty.
    """
    if options.token_file is None:
        return options.token
    if options.token is not None:
        raise ConfigError("give --token or --token-file, not both")
    try:
        token = options.token_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"--token-file {options.token_file}: {error.strerror}") from None
    if not token:
        raise ConfigError(f"--token-file {options.token_file} is empty")
    return token


def program_name() -> str:
    return Path(sys.argv[0]).name
