"""How text became the tokens of a run, as far as its token file tells; and back.

Bytes have a tokenizer, too: one of Hugging Face's library with 256 tokens and no merges, whose ids are the bytes.
"""

import hashlib
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from oobleck_jax.config import RunConfig
from oobleck_jax.data import BUILTIN
from oobleck_jax.errors import ConfigError
from oobleck_jax.token_file import read_token_file


BYTES = "bytes"  # what the header of a token file says where each byte is a token


def tokenizer_of(config: RunConfig, given: Path | None = None) -> Tokenizer:
    """Return the tokenizer of a run's data.

    Args:
        given: its tokenizer.json; by default it is looked for beside the token file.

    Raises:
        ConfigError: nobody knows it, or what is given is another one.
    """
    named = _named(config)
    if named == BYTES:
        return byte_tokenizer()
    name, _, digest = (named or "").partition(" sha256:")
    path = given if given is not None else Path(config.data).with_name(name) if name else None
    if path is None:
        raise ConfigError(f"{config.data} has no header that names its tokenizer; give --tokenizer FILE")
    if not path.is_file():
        raise ConfigError(f"there is no {path}, the tokenizer of {config.data}; give --tokenizer FILE")
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if digest and found != digest:
        raise ConfigError(
            f"{path} is not the tokenizer of {config.data}: its sha256 is {found[:12]}..., not {digest[:12]}...; give "
            "--tokenizer FILE"
        )
    try:
        return Tokenizer.from_str(content.decode())
    except Exception as error:  # tokenizers raises nothing more special
        raise ConfigError(f"{path} is no tokenizer.json: {error}") from error


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer whose tokens are the bytes of UTF-8."""
    tokenizer = Tokenizer(models.BPE(vocab={_letter(byte): byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _named(config: RunConfig) -> str | None:
    """Return what the token file says of its tokenizer."""
    if config.data == BUILTIN:
        return BYTES
    _, header = read_token_file(Path(config.data), config.data_dtype)
    return None if header is None else header.tokenizer


def _letter(byte: int) -> str:
    """Return the letter that stands for a byte in byte-level vocabularies (GPT-2): itself if it can be seen."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in visible:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in visible].index(byte))
