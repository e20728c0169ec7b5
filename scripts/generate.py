"""Continue a text with the model of a checkpoint.

python scripts/generate.py runs/gpt-laptop-20250101-120000 --prompt "The import statement "
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tokenizers import Tokenizer

from oobleck_jax.errors import ConfigError
from oobleck_jax.sampling import WholeModel, sample
from oobleck_jax.saved_model import load_model
from oobleck_jax.script import run_script
from oobleck_jax.tokenizer import tokenizer_of


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Flags of this script."""

    run_dir: Annotated[Path, tyro.conf.Positional]  # folder of the run
    prompt: str  # the text to continue
    max_new_tokens: int = 200  # tokens to generate
    temperature: float = 0.8  # below 1: likelier tokens; 0: always the likeliest
    top_k: int = 40  # take one of so many of the likeliest tokens; 0: of all
    seed: int = 0  # of the random numbers
    step: int | None = None  # use the checkpoint of this step (default: the newest)
    tokenizer: Path | None = None  # tokenizer.json of the data (default: beside the token file)


def main(arguments: Arguments) -> int:
    """Read, sample, print as it comes; return the exit code."""
    try:
        _check(arguments)
        saved = load_model(arguments.run_dir, step=arguments.step, on_damage=lambda error: _note(str(error)))
        tokenizer = tokenizer_of(saved.config, arguments.tokenizer)
        prompt = tokenizer.encode(arguments.prompt, add_special_tokens=False).ids
        if not prompt:
            raise ConfigError("--prompt is empty; give at least one token")
        vocab_size = saved.config.model.vocab_size
        if max(prompt) >= vocab_size:
            raise ConfigError(f"--prompt has the token {max(prompt)}, but the model's vocabulary has {vocab_size}")
    except (ConfigError, OSError) as error:
        _note(str(error))
        return 2
    tokens = sample(
        WholeModel(saved.config.model.build(), saved.params),
        prompt,
        max_new_tokens=arguments.max_new_tokens,
        # Positions beyond the sequences of the training have never been learned.
        context_length=saved.config.sequence_length,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    print(arguments.prompt, end="", flush=True)
    try:
        for text in decoded(tokenizer, prompt, tokens):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print()
    return 0


def decoded(tokenizer: Tokenizer, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens as soon as it is certain: a token may end within a character."""
    ids, printed = list(prompt), len(tokenizer.decode(prompt))
    for token in tokens:
        ids.append(token)
        certain = tokenizer.decode(ids).rstrip("\ufffd")
        if len(certain) > printed:
            yield certain[printed:]
            printed = len(certain)
    yield tokenizer.decode(ids)[printed:]


def _check(arguments: Arguments) -> None:
    for name in ("max_new_tokens", "temperature", "top_k"):
        if getattr(arguments, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must not be negative")


def _note(text: str) -> None:
    print(f"generate.py: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_script(main, tyro.cli(Arguments, description=(__doc__ or "").partition("\n")[0])))
