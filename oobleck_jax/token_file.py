"""Token files: a flat array of token ids, and a small JSON header beside it.

    NAME.bin    little-endian uint16 or uint32, nothing else
    NAME.json   {"format_version": 1, "dtype": "uint16", "num_tokens": 300000, "vocab_size": 50257,
                 "tokenizer": "tokenizer.json sha256:1a2b...", "sha256": "..."}

`sha256` is what `sha256sum NAME.bin` prints. A `.bin` without a header, as nanoGPT writes it, can be read too when its
dtype is known.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path

import msgspec
import numpy as np

from oobleck_jax.errors import DataError


FORMAT_VERSION = 1
DTYPES = ("uint16", "uint32")
_SCAN_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFileHeader:
    """What `NAME.json` says of `NAME.bin`."""

    dtype: str  # "uint16" or "uint32"
    num_tokens: int
    vocab_size: int  # token ids are below it
    tokenizer: str  # for people
    sha256: str  # of the content of the token file
    format_version: int = FORMAT_VERSION


def header_path(path: Path) -> Path:
    """Return where the header of a token file is."""
    return path.with_suffix(".json")


def read_token_file(path: Path, default_dtype: str) -> tuple[np.ndarray, TokenFileHeader | None]:
    """Map a token file into memory and check that its size is right.

    Args:
        default_dtype: the token type, if there is no header.

    Returns:
        The tokens, and the header where there is one.

    Raises:
        DataError: the file is missing, empty, truncated or of an unknown type.
    """
    if path.suffix == ".json":
        raise DataError(f"--data {path} is a header; give the .bin file beside it")
    if not path.is_file():
        raise DataError(f"--data {path} does not exist; make it with scripts/prepare_data.py, or use --data builtin")
    header = _read_header(header_path(path))
    dtype_name = default_dtype if header is None else header.dtype
    if dtype_name not in DTYPES:
        where = "--data-dtype" if header is None else f"dtype in {header_path(path)}"
        raise DataError(f"{where} is {dtype_name!r}; it must be one of {', '.join(DTYPES)}")
    dtype = np.dtype(dtype_name).newbyteorder("<")
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        raise DataError(f"{path} is empty; make it again with scripts/prepare_data.py")
    if header is not None and num_bytes != header.num_tokens * dtype.itemsize:
        raise DataError(
            f"{path} has {num_bytes} bytes, but its header {header_path(path).name} says {header.num_tokens} tokens of "
            f"{dtype.itemsize} bytes = {header.num_tokens * dtype.itemsize}: truncated, or not its header; copy both "
            "files again, or make them again with scripts/prepare_data.py"
        )
    if num_bytes % dtype.itemsize:
        raise DataError(
            f"{path} has {num_bytes} bytes, not a multiple of the {dtype.itemsize} bytes of {dtype_name}: truncated, "
            "or another type; copy it again or set --data-dtype"
        )
    return np.memmap(path, dtype=dtype, mode="r"), header


def write_token_file(path: Path, chunks: Iterable[np.ndarray], *, vocab_size: int, tokenizer: str) -> TokenFileHeader:
    """Write a token file and its header; neither is ever seen half written.

    The token type is uint16 where the vocabulary fits, else uint32.
    """
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    digest, num_tokens = hashlib.sha256(), 0
    partial_bin, partial_header = (p.with_name(f".{p.name}.partial") for p in (path, header_path(path)))
    try:
        with partial_bin.open("wb") as file:
            for chunk in chunks:
                content = chunk.astype(dtype).tobytes()
                file.write(content)
                digest.update(content)
                num_tokens += len(chunk)
            _sync(file)
        if num_tokens == 0:
            raise DataError(f"nothing to write to {path}: the texts are empty")
        header = TokenFileHeader(
            dtype="uint16" if dtype.itemsize == 2 else "uint32",
            num_tokens=num_tokens,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            sha256=digest.hexdigest(),
        )
        with partial_header.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(header), indent=2) + b"\n")
            _sync(file)
        # The header goes first: if we die in between, the sizes disagree and the file is refused.
        partial_header.replace(header_path(path))
        partial_bin.replace(path)
    finally:
        partial_bin.unlink(missing_ok=True)
        partial_header.unlink(missing_ok=True)
    return header


def scan_tokens(tokens: np.ndarray) -> tuple[int, bool]:
    """Read all tokens once; return the largest, and whether every second one is 0 (32-bit tokens read as 16)."""
    largest, odd_are_zero = 0, tokens.dtype.itemsize == 2 and len(tokens) > 1
    for chunk in _chunks(tokens):
        largest = max(largest, int(chunk.max()))
        odd_are_zero = odd_are_zero and not chunk[1::2].any()
    return largest, odd_are_zero


def _chunks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(tokens), _SCAN_TOKENS):
        yield tokens[start : start + _SCAN_TOKENS]


def _read_header(path: Path) -> TokenFileHeader | None:
    if not path.is_file():
        return None
    try:
        header = msgspec.json.decode(path.read_bytes(), type=TokenFileHeader)
    except msgspec.MsgspecError as error:
        raise DataError(
            f"{path} is not the header of a token file ({error}); remove it, or make both again with "
            "scripts/prepare_data.py"
        ) from error
    if header.format_version != FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {header.format_version}, this program reads {FORMAT_VERSION}; make the files "
            "again with scripts/prepare_data.py"
        )
    return header


def _sync(file: BufferedWriter) -> None:
    file.flush()
    os.fsync(file.fileno())
