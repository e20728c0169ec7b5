"""Folders in a store that is no file system (gs://, s3://, az://), as far as checkpoints need them.

Everything goes through fsspec, which is what `etils.epath`, and so Orbax, uses for such addresses: what they can reach,
by the same packages and settings, can be reached here. Not through epath itself, for two reasons. It answers from
listings that it keeps, in which what other processes have written since is missing. And where TensorFlow is installed
it imports that, which takes seconds, and device memory.

Clients may hang, and raise whatever they like. So each call is made in a daemonic thread, up to three times, and given
up after a limit. An error leaves this module as FileNotFoundError or `ObjectStoreError`, unless files of this machine
are the matter. A call that was given up may still be carried out: what it writes is then part of a checkpoint that
nobody counts on, or completes one that is intact.
"""

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from oobleck_jax.errors import ConfigError, ObjectStoreError, cause_of


T = TypeVar("T")

_CALL_S = 30.0  # for one call, with all that is tried again
_SLOWEST_BYTES_PER_S = 1 << 20  # of a transfer, after that
_NUM_ATTEMPTS = 3
_PAUSE_S = 1.0  # between two of them
_TELL_S = 2.0  # between two signs of life
# All files of a group at once, of which most are small; fsspec leaves those that wait with a warning if one fails.
_ALL = -1
_ADDRESS = re.compile(r"(gs|gcs|s3|az|abfs)://[^/]+(/.*)?")
_clients: dict[str, Any] = {}  # by scheme and bucket; one that failed is made anew, with the credentials of then


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectPath:
    """An object, or a folder of objects.

    Attributes:
        address: such as s3://bucket/runs/a, without a slash at the end.
    """

    address: str

    def __str__(self) -> str:
        return self.address

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(address=f"{self.address}/{name}")

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]

    @property
    def bucket(self) -> "ObjectPath":
        return ObjectPath(address="/".join(self.address.split("/")[:3]))

    def is_missing(self) -> bool:
        """Tell whether a bucket is known not to be there; not everybody may look."""

        def look(files: Any, path: str) -> None:
            try:
                files.info(path)
            except FileNotFoundError:  # gcsfs says that, too, of one that is empty, to those who may not look it up
                files.ls(path)

        try:
            _call(self, look)
        except (FileNotFoundError, ObjectStoreError) as error:
            return isinstance(error, FileNotFoundError)
        return False

    def folders(self) -> list[str]:
        """Return the names of the folders in this one."""

        def names(files: Any, path: str) -> list[str]:
            found = [entry["name"] for entry in files.ls(path, detail=True) if entry["type"] == "directory"]
            return [name.rstrip("/").rpartition("/")[2] for name in found]

        try:
            return _call(self, names)
        except FileNotFoundError:
            return []

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all objects in a folder and its folders, by their paths in it, in bytes."""
        return _call(self, _sizes)

    def read_bytes(self) -> bytes:
        return _call(self, lambda files, path: files.cat_file(path))

    def write_bytes(self, content: bytes) -> None:
        """Write an object, which appears as a whole."""
        try:
            _call(self, lambda files, path: files.pipe_file(path, content))
        except FileNotFoundError as error:
            raise _no_such_place(self, error) from error

    def remove(self, *, first: str) -> None:
        """Remove a folder with all that is in it, and nothing else.

        Clients that are told to remove a folder list it by its name as a prefix, and gcsfs 2025.3.0 then removed
        `generation-10` with `generation-1`. So the objects are named here.

        Args:
            first: the object to begin with.
        """

        def remove(files: Any, path: str) -> None:
            names = _sizes(files, path)
            if names.pop(first, None) is not None:
                files.rm_file(f"{path}/{first}")
            if names:
                files.rm([f"{path}/{name}" for name in names])
            if left := _sizes(files, path):  # some clients keep quiet about what they could not remove
                raise OSError(errno.EIO, f"{min(left)} is still there")

        _call(self, remove)

    def upload(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Copy files to here.

        Args:
            folder: where they are.
            sizes: of them, by their paths in it, in bytes.
        """
        there = [str(folder / name) for name in sizes]

        def put(files: Any, path: str) -> None:
            files.put(there, [f"{path}/{name}" for name in sizes], batch_size=_ALL)

        try:
            _call(self, put, num_bytes=sum(sizes.values()))
        except FileNotFoundError as error:
            if not all(map(os.path.exists, there)):
                raise FileNotFoundError(errno.ENOENT, f"what was to be uploaded is gone from {folder}") from error
            raise _no_such_place(self, error) from error

    def download(self, folder: Path, sizes: Mapping[str, int], tell: Callable[[], None]) -> None:
        """Copy objects into a folder of this machine.

        Args:
            folder: where they go.
            sizes: of them, by their paths, in bytes.
            tell: called every few seconds; may raise to end it.

        Raises:
            OSError: there is no room for them; names the folder.
        """

        def get(files: Any, path: str) -> None:
            there = [str(folder / name) for name in sizes]
            files.get([f"{path}/{name}" for name in sizes], there, batch_size=_ALL)

        try:
            _call(self, get, num_bytes=sum(sizes.values()), tell=tell)
        except ObjectStoreError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(cause.errno, cause.strerror, str(folder)) from error
            raise


def object_path(given: str) -> ObjectPath | None:
    """Return where an address leads; None: it is the path of a file system.

    Nothing is asked of the store: it may be out of reach just now.

    Raises:
        ConfigError: it is an address, but not one that can be used; says why, and what to install. Secrets that may
            be in it are not repeated.
    """
    if "://" not in given and not re.match(r"[a-z][a-z0-9+.-]+:/", given):
        return None
    scheme, _, rest = given.partition(":")
    shown, query = given.partition("?")[::2]
    user, _, place = rest.rpartition("@")
    if ":" in user:
        shown = f"{scheme}://...@{place.partition('?')[0]}"
        raise ConfigError(f"{shown} has a password: leave it out, clients look for credentials elsewhere")
    if query or not _ADDRESS.fullmatch(given):
        raise ConfigError(
            f"{shown}{'?...' if query else ''} is no address of an object store: write it as gs://BUCKET/FOLDER, "
            "s3://BUCKET/FOLDER or az://CONTAINER/FOLDER, or give the path of a folder"
        )
    if set(given) & set("*?[]"):
        raise ConfigError(f"{given} has one of *?[], which stand for other characters there")
    from fsspec import get_filesystem_class  # late: most runs do not need it

    try:
        get_filesystem_class(scheme)
    except ImportError as error:  # it says what to install; its cause, what is missing
        raise ConfigError(f"{shown} cannot be used: {error} ({error.__cause__ or 'it is missing'})") from error
    return ObjectPath(address=given.rstrip("/"))


def _call(
    path: ObjectPath, what: Callable[[Any, str], T], *, num_bytes: int = 0, tell: Callable[[], None] = lambda: None
) -> T:
    """Have something done by the client of a store, which is given the path as it wants it."""
    results: list[T] = []
    errors: list[Exception] = []
    given_up = threading.Event()

    def call() -> None:
        for _ in range(_NUM_ATTEMPTS):
            try:
                files = _client(path)
                files.invalidate_cache()
                results.append(what(files, files._strip_protocol(path.address)))
                return
            except Exception as error:  # clients have errors of all kinds
                errors.append(error)
                if isinstance(error, FileNotFoundError):
                    return
                _clients.pop(str(path.bucket), None)
            if given_up.wait(_PAUSE_S):
                return

    limit_s = _CALL_S + num_bytes / _SLOWEST_BYTES_PER_S
    until_s = time.monotonic() + limit_s
    thread = threading.Thread(target=call, name="object-store", daemon=True)
    thread.start()
    try:
        while thread.is_alive() and (left_s := until_s - time.monotonic()) > 0:
            thread.join(min(left_s, _TELL_S))
            tell()
    finally:
        given_up.set()
    if thread.is_alive() and not results:
        _clients.pop(str(path.bucket), None)
        raise ObjectStoreError(path, f"no answer within {limit_s:.0f} s")
    if results:
        return results[0]
    if isinstance(errors[-1], FileNotFoundError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from errors[-1]
    raise ObjectStoreError(path, cause_of(errors[-1])) from errors[-1]


def _client(path: ObjectPath) -> Any:
    from fsspec.core import url_to_fs

    root = str(path.bucket)
    client = _clients.get(root)
    if client is None:
        # One for all threads, unlike those that fsspec keeps.
        client, _ = url_to_fs(root, use_listings_cache=False, skip_instance_cache=True)
        _clients[root] = client
    return client


def _sizes(files: Any, path: str) -> dict[str, int]:
    try:
        found = files.find(path, detail=True)
    except FileNotFoundError:
        return {}
    folder = f"{path}/"  # not all that begins with the path is in it
    return {
        name.removeprefix(folder): int(entry["size"] or 0) for name, entry in found.items() if name.startswith(folder)
    }


def _no_such_place(path: ObjectPath, error: FileNotFoundError) -> ObjectStoreError:
    return ObjectStoreError(path, f"there is no such place: {cause_of(error.__cause__ or error)}")
