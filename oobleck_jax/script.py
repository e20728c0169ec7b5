"""What our scripts have in common: results find a place, and what cannot be done is said in one line."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from oobleck_jax.errors import ConfigError, OobleckError


A = TypeVar("A")

_OUTPUTS = ("json", "plot", "output")  # flags that name what is written, in every script that has them
_PICTURES = (".png", ".pdf", ".svg")


def run_script(main: Callable[[A], int | None], arguments: A) -> int:
    """Run a script, and return its exit code: 2 for wrong input, 1 for what failed later.

    Where its results go is made ready first, so that nothing is lost at the end of long work.
    """
    try:
        for name in _OUTPUTS:
            path: Path | None = getattr(arguments, name, None)
            if path is not None:
                make_room(path, flag=f"--{name}")
            if path is not None and name == "plot":
                check_picture(path, flag="--plot")
        return main(arguments) or 0
    except OobleckError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)  # noqa: T201
        return 2 if isinstance(error, ConfigError) else 1


def make_room(path: Path, *, flag: str) -> None:
    """Make the folder of a file that will be written.

    Raises:
        ConfigError: it cannot be made, or nothing can be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: its folder cannot be made ({error.strerror}); choose another") from None
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written; choose another folder")


def check_picture(path: Path, *, flag: str, besides: tuple[str, ...] = ()) -> None:
    """Refuse a name whose ending is no kind of picture that we draw, and none of those besides.

    Raises:
        ConfigError: it is none.
    """
    endings = (*_PICTURES, *besides)
    if path.suffix not in endings:
        raise ConfigError(f"{flag} {path}: the ending says what is written; give one of {', '.join(endings)}")
