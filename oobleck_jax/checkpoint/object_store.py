"""Folders in a store that is no file system (gs://, s3://, az://, ...), as far as checkpoints need them.

Everything goes through fsspec, which is what `etils.epath`, and so Orbax, uses for such addresses: what they can reach,
by the same packages and settings, can be reached here. Not through epath itself, for two reasons. It answers from
listings that it keeps, in which what other processes have written since is missing. And where TensorFlow is installed
it imports that, which takes seconds, and device memory.

Clients may hang, and raise whatever they like. So each call has a limit, in a daemonic thread that cannot keep the
process from ending, and an error leaves this module as FileNotFoundError or `ObjectStoreError`. A call that was given
up may still be carried out: what it writes is then part of a checkpoint that nobody counts on, or completes one that
is intact.
"""

import errno
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from oobleck_jax.errors import ConfigError, ObjectStoreError


T = TypeVar("T")

_CALL_S = 30.0  # for one call, with all that the client tries again by itself
_SLOWEST_BYTES_PER_S = 1 << 20  # of the transfer of a file, after that
_NUM_TRANSFERS = 4  # at once: a file may be small, and the way long
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://[^/]")
_connecting = threading.Lock()


@dataclass(frozen=True, order=True, slots=True)
class ObjectPath:
    """An object, or a folder of objects; its methods do what those of `pathlib.Path` do.

    Attributes:
        address: such as s3://bucket/runs/a, without a slash at the end.
    """

    address: str

    def __str__(self) -> str:
        return self.address

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(f"{self.address}/{name}")

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        return ObjectPath(self.address.rpartition("/")[0])

    def exists(self) -> bool:
        """Tell whether there is an object of this name."""
        try:
            return _call(self, lambda files, path: files.info(path)["type"] == "file")
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Tell whether there are objects below this name."""
        try:
            return next(self.iterdir(), None) is not None
        except FileNotFoundError:
            return False

    def iterdir(self) -> Iterator["ObjectPath"]:
        """Yield what is in a folder."""

        def names(files: Any, path: str) -> list[str]:
            found = [entry["name"].rstrip("/") for entry in files.ls(path, detail=True)]
            return [name.rpartition("/")[2] for name in found if name != path]

        return (self / name for name in _call(self, names))

    def read_bytes(self) -> bytes:
        return _call(self, lambda files, path: files.cat_file(path))

    def write_bytes(self, content: bytes) -> None:
        """Write an object, which appears as a whole."""
        _write(self, lambda files, path: files.pipe_file(path, content))

    def unlink(self, *, missing_ok: bool = False) -> None:
        try:
            _call(self, lambda files, path: files.rm_file(path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Remove a folder with all that is in it."""
        with suppress(FileNotFoundError):  # there are no empty folders
            _call(self, lambda files, path: files.rm(path, recursive=True))

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all objects in a folder and its folders, by their paths in it, in bytes."""

        def found(files: Any, path: str) -> dict[str, int]:
            entries = files.find(path, detail=True)
            return {name.removeprefix(f"{path}/"): int(entry["size"]) for name, entry in entries.items()}

        try:
            return _call(self, found)
        except FileNotFoundError:
            return {}

    def upload(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Copy files to here.

        Args:
            folder: where they are.
            sizes: of them, by their paths in it, in bytes.
        """

        def upload(name: str) -> None:
            extra_s = sizes[name] / _SLOWEST_BYTES_PER_S
            _write(self / name, lambda files, path: files.put_file(str(folder / name), path), extra_s=extra_s)

        _in_parallel(upload, sizes)

    def download(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Copy objects into a folder of this machine; see `upload`."""
        for name in sizes:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)

        def download(name: str) -> None:
            extra_s = sizes[name] / _SLOWEST_BYTES_PER_S
            _call(self / name, lambda files, path: files.get_file(path, str(folder / name)), extra_s=extra_s)

        _in_parallel(download, sizes)


def object_path(given: str) -> ObjectPath | None:
    """Return where an address leads; None: it is the path of a file system.

    Nothing is asked of the store: it may be out of reach just now.

    Raises:
        ConfigError: it is an address, but not one that can be used; says why, and what to install.
    """
    if "://" not in given and not re.match(r"[a-z][a-z0-9+.-]+:/", given):
        return None
    if given.startswith("file:"):
        raise ConfigError(f"{given} is in a file system: give the path alone")
    if not _ADDRESS.match(given):
        raise ConfigError(f"{given} is no address: write it as gs://BUCKET/FOLDER or s3://BUCKET/FOLDER")
    if set(given) & set("*?[]"):
        raise ConfigError(f"{given} has one of *?[], which stand for other characters where folders are removed")
    from fsspec import get_filesystem_class  # late: most runs do not need it

    try:
        get_filesystem_class(given.partition("://")[0])
    except ValueError as error:
        raise ConfigError(f"{given} cannot be used: {error}") from error
    except ImportError as error:  # it says what to install; its cause, what is missing
        raise ConfigError(f"{given} cannot be used: {error} ({error.__cause__ or 'it is missing'})") from error
    return ObjectPath(given.rstrip("/"))


def _call(path: ObjectPath, what: Callable[[Any, str], T], *, extra_s: float = 0.0) -> T:
    """Have something done by the client of a store, which is given the path as it wants it."""
    results: list[T] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            files = _connect(path)
            files.invalidate_cache()
            results.append(what(files, files._strip_protocol(path.address)))
        except Exception as error:  # clients have errors of all kinds
            errors.append(error)

    limit_s = _CALL_S + extra_s
    thread = threading.Thread(target=call, name="object-store", daemon=True)
    thread.start()
    thread.join(limit_s)
    if results:
        return results[0]
    if not errors:
        raise ObjectStoreError(path, f"no answer within {limit_s:.0f} s")
    if isinstance(errors[0], FileNotFoundError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from errors[0]
    raise ObjectStoreError(path, _cause(errors[0])) from errors[0]


def _write(path: ObjectPath, what: Callable[[Any, str], object], *, extra_s: float = 0.0) -> None:
    try:
        _call(path, what, extra_s=extra_s)
    except FileNotFoundError as error:
        raise ObjectStoreError(path, f"there is no such place: {_cause(error.__cause__ or error)}") from error


def _connect(path: ObjectPath) -> Any:
    scheme, _, rest = path.address.partition("://")
    with _connecting:
        return _client(f"{scheme}://{rest.partition('/')[0]}")


@cache
def _client(root: str) -> Any:
    from fsspec.core import url_to_fs

    # One for all threads, unlike those that fsspec keeps.
    client, _ = url_to_fs(root, use_listings_cache=False, skip_instance_cache=True)
    return client


def _cause(error: BaseException) -> str:
    text = str(error.strerror if isinstance(error, OSError) and error.strerror else error)
    lines = text.strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _in_parallel(function: Callable[[str], None], names: Iterable[str]) -> None:
    """Call a function for all names, a few at once; raise the first error.

    The threads of `concurrent.futures` would be waited for when the process ends.
    """
    todo, taking, errors = iter(names), threading.Lock(), list[OSError]()

    def work() -> None:
        while not errors:
            with taking:
                name = next(todo, None)
            if name is None:
                return
            try:
                function(name)
            except OSError as error:
                errors.append(error)

    threads = [threading.Thread(target=work, name="object-store-transfer", daemon=True) for _ in range(_NUM_TRANSFERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # each call has its limit
    if errors:
        raise errors[0]
