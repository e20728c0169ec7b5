"""The directory of a run: who may write to it, and where what lies.

config.json      the configuration, with the preset's name
events.jsonl     what happened; metrics.jsonl: one object for each step; journal.jsonl: commit decisions (events.py)
logs/node-K.log  what the agent and the worker of node K printed
lock             held by the coordinator as long as it lives
"""

import fcntl
import os
from pathlib import Path
from types import TracebackType

from oobleck_jax.errors import ConfigError


class RunDir:
    """A run directory that belongs to this process until it is closed, or the process ends."""

    def __init__(self, path: Path) -> None:
        """Make the directory, and take it.

        Raises:
            ConfigError: it cannot be made, or another coordinator has it.
        """
        self.path = path
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"--run-dir {path} cannot be used: {error.strerror}") from None
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

    def close(self) -> None:
        os.close(self._lock)  # and with it the lock

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
