"""Compiled programs on disk, found without tracing them.

JAX's own persistent cache finds a program by its text, so a process must trace and lower a program before it can look:
three quarters of the time that a worker of a small model needs to start, on the cores of survivors when it replaces one
that died. Here a program is found in two ways: by its key and the *origin*, a digest of everything else that decides
what the program is; and, where the origin is new, by its text after all. Models of a user's own are made of files that
nobody can list, so their origin is one run.
"""

import contextlib
import fcntl
import hashlib
import logging
import pickle
import re
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from oobleck_jax.execution.compilations import note_loaded, num_read
from oobleck_jax.execution.jaxlib_private import deserialized, kept_out_of_cache, serialized
from oobleck_jax.kept_files import mark_used, remove_unused


logger = logging.getLogger(__name__)

_TURN_LIMIT_S = 120.0
_DIGEST_BYTES = hashlib.sha256().digest_size
_NAMES = re.compile(r"[0-9a-f]{32}(\.turn)?|tmp\w{8}")  # also of what a process left that was killed while it wrote


class ProgramStore:
    """Programs that the workers of a host share, and facts about them. Where it cannot be used, all is as without it.

    Attributes:
        origin: what facts and programs depend on, besides their keys.
    """

    def __init__(self, folder: Path, origin: str, environment: str = "") -> None:
        """Open the store in a folder, and clear away what nobody used for a long time.

        Args:
            folder: is made if need be.
            origin: as above.
            environment: what programs depend on, besides their keys and their text.
        """
        self.origin, self._folder, self._environment = origin, folder, environment
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning("programs cannot be kept in %s: %s", folder, error.strerror)
            return
        remove_unused(folder, _NAMES)

    def program(
        self, key: tuple[Hashable, ...], lower: Callable[[], jax.stages.Lowered], options: Mapping[str, str | bool]
    ) -> jax.stages.Compiled:
        """Return the program of a key. Of several processes that need a new one at the same time, one compiles it.

        Args:
            key: the same in every process of the origin; names the devices.
            lower: traces and lowers the program; called only if the key is new.
            options: for the compiler.
        """
        key = (*key, *sorted(options.items()))
        if (program := self._load_program(key, self.fact(key))) is not None:
            return program
        with self._turn(key):
            if (program := self._load_program(key, self.fact(key))) is not None:
                return program
            lowered = lower()
            # The text says nothing of devices: the key does.
            name = digest_of(key, lowered.as_text(), lowered.in_tree, lowered.out_tree, self._environment)
            if (program := self._load_program(key, name)) is None:
                num_read_before = num_read()
                with kept_out_of_cache():
                    program = lowered.compile(dict(options))
                if num_read() > num_read_before:
                    return program  # somebody else has put it into JAX's cache: see `kept_out_of_cache`
                self._save_program(name, program)
            self.keep_fact(key, name)
            return program

    def fact(self, key: Hashable) -> Any:
        """Return what is known under a key; None: nothing."""
        return self._load(self._name(key))

    def keep_fact(self, key: Hashable, fact: Any) -> None:
        """Keep a plain value that took tracing to find out."""
        self._save(self._name(key), fact)

    def _load_program(self, key: tuple[Hashable, ...], name: str | None) -> jax.stages.Compiled | None:
        found = None if name is None else self._load(name)
        if found is None:
            return None
        try:
            program = deserialized(found)
        except Exception as error:  # XLA raises what it likes, and there is always the compiler
            logger.warning("a stored program cannot be loaded and will be compiled again: %s", error)
            return None
        note_loaded(" ".join(part for part in key if isinstance(part, str)))
        return program

    def _save_program(self, name: str, program: jax.stages.Compiled) -> None:
        try:
            content = serialized(program)
        except Exception as error:  # as above
            logger.warning("a program cannot be stored and will be compiled again next time: %s", error)
        else:
            self._save(name, content)

    def _load(self, name: str) -> Any:
        path = self._folder / name
        try:
            content = path.read_bytes()
        except OSError:
            return None
        mark_used(path)
        if hashlib.sha256(content[_DIGEST_BYTES:]).digest() != content[:_DIGEST_BYTES]:
            logger.warning("%s is damaged and will be made again", path)
            return None
        return pickle.loads(content[_DIGEST_BYTES:])

    def _save(self, name: str, value: Any) -> None:
        payload = pickle.dumps(value)
        draft: Path | None = None
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                draft = Path(file.name)
                file.write(hashlib.sha256(payload).digest() + payload)
            draft.replace(self._folder / name)
        except OSError as error:
            logger.warning("a program cannot be stored and will be compiled again next time: %s", error)
            if draft is not None:
                draft.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _turn(self, key: Hashable) -> Iterator[None]:
        """Wait until no other process compiles the program of a key; for a while, in case that process is stuck."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # no folder, no locks: then several compile it
                file = stack.enter_context((self._folder / f"{self._name(key)}.turn").open("a"))
                deadline_s = time.monotonic() + _TURN_LIMIT_S
                while not _try_lock(file.fileno()) and time.monotonic() < deadline_s:
                    time.sleep(0.02)
            yield

    def _name(self, key: Hashable) -> str:
        text = repr(key)
        assert " at 0x" not in text, f"a key must be the same in every process: {text}"
        return digest_of(self.origin, text)


def digest_of(*parts: Any) -> str:
    """Return a name made of everything given."""
    return hashlib.sha256(repr([str(part) for part in parts]).encode()).hexdigest()[:32]


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
