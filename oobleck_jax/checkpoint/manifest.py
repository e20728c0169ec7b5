"""What a checkpoint says of itself: `manifest.json`, the file whose presence makes it count.

Nothing here depends on plan, nodes or devices: a checkpoint is a set of groups (a layer's own parameters, or a tied
parameter, each with its optimizer state) and the place in the data where the run goes on.
"""

import zlib
from typing import Any

import msgspec


FORMAT_VERSION = 1


class ArrayRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an array looks like."""

    shape: tuple[int, ...]
    dtype: str


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a file contains."""

    num_bytes: int
    crc32: int


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What was saved of one group; travels from the worker that wrote it to the coordinator."""

    checksum: int  # of the arrays, in this order: the same on all holders of the group
    num_bytes: int  # of the arrays
    arrays: dict[str, ArrayRecord]  # by path in the state: "params/qkv/kernel"
    files: dict[str, FileRecord]  # by path in the group's folder


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole checkpoint."""

    step: int  # the last one that it contains
    generation: int  # that saved it
    seed: int
    samples_used: int  # of the endless sequence of passes: where the data goes on
    num_train_samples: int  # of one pass
    data_fingerprint: str  # of the training data: a file may move, but not change
    config: dict[str, Any]  # what config.json says, the preset's reference included
    versions: dict[str, str]  # of the software
    groups: dict[str, GroupRecord]

    @property
    def next_step(self) -> int:
        return self.step + 1

    @property
    def num_bytes(self) -> int:
        """Size of all states."""
        return sum(group.num_bytes for group in self.groups.values())


class _Version(msgspec.Struct, frozen=True, kw_only=True):
    format_version: int


class _File(_Version, frozen=True, kw_only=True, forbid_unknown_fields=True):
    crc32: int  # of the manifest
    manifest: Manifest


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of the file: JSON that people can read, with a checksum."""
    file = _File(format_version=FORMAT_VERSION, crc32=_crc32(manifest), manifest=manifest)
    return msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"


def decode_manifest(content: bytes) -> Manifest:
    """Read what `encode_manifest` wrote.

    Raises:
        ValueError: it is damaged, or was written by another version of this program.
    """
    try:
        version = msgspec.json.decode(content, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise ValueError(f"has format version {version}, this program reads {FORMAT_VERSION}")
        file = msgspec.json.decode(content, type=_File)
    except msgspec.MsgspecError as error:
        raise ValueError(f"is no manifest: {error}") from error
    if file.crc32 != _crc32(file.manifest):
        raise ValueError("has other content than was written: its checksum differs")
    return file.manifest


def _crc32(manifest: Manifest) -> int:
    return zlib.crc32(msgspec.json.encode(manifest))
