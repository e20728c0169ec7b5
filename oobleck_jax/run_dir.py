"""The directory of a run: who may write to it, and where what lies.

config.json      the configuration, with the preset's name
events.jsonl     what happened; metrics.jsonl: one object for each step; journal.jsonl: commit decisions (events.py)
logs/node-K.log  what the agent and the workers of node K printed; logs/fabric.log: what coordination services did
coordinator.json how to reach the coordinator, with the secret of the run: only its owner can read it
lock             held by the coordinator as long as it lives
"""

import fcntl
import os
from pathlib import Path
from types import TracebackType

import msgspec

from oobleck_jax.errors import ConfigError
from oobleck_jax.process_id import ProcessId


class Contact(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the coordinator of a run, and what it has started."""

    address: str  # host:port
    token: str | None
    tls_authority: str | None  # file of certificates to trust; None: no TLS
    pid: int  # of the coordinator
    agents: dict[int, ProcessId] = {}  # on its machine, by node
    fabric_host: ProcessId | None = None


def read_contact(run_dir: Path) -> Contact | None:
    """Return how to reach the coordinator that has, or had, a run directory; None: there was none."""
    try:
        return msgspec.json.decode((run_dir / "coordinator.json").read_bytes(), type=Contact)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{run_dir / 'coordinator.json'} cannot be read: {error}") from None


def make_log_dir(run_dir: Path | None) -> Path | None:
    """Make a run directory, and return the folder in it for the logs of nodes; None: there is none.

    Raises:
        ConfigError: it cannot be made.
    """
    if run_dir is None:
        return None
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run-dir {run_dir} cannot be used: {error.strerror}; choose another") from None
    return run_dir.resolve() / "logs"


class RunDir:
    """A run directory that belongs to this process until it is closed, or the process ends."""

    def __init__(self, path: Path) -> None:
        """Make the directory, and take it.

        Raises:
            ConfigError: it cannot be made, or another coordinator has it.
        """
        self.path = path
        make_log_dir(path)
        try:
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"--run-dir {path} cannot be used: {error.strerror}; choose another") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(self._lock, 20).decode(errors="replace").strip()
            os.close(self._lock)
            raise ConfigError(
                f"--run-dir {path} is in use by a running coordinator (process {owner}); choose another, or end it"
            ) from None
        os.ftruncate(self._lock, 0)
        os.write(self._lock, str(os.getpid()).encode())

    def log_path(self, node: int) -> Path:
        return self.path / "logs" / f"node-{node}.log"

    def write_contact(self, contact: Contact) -> None:
        """Tell how to reach this process; a reader sees all of it or what was there before."""
        draft = self.path / "coordinator.json.new"
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(contact) + b"\n")
        draft.replace(self.path / "coordinator.json")

    def close(self) -> None:
        os.close(self._lock)  # and with it the lock

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
