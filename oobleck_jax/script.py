"""What our scripts have in common: results find a place, and what cannot be done is said in one line."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from oobleck_jax.errors import ConfigError, OobleckError


A = TypeVar("A")


def run_script(main: Callable[[A], int | None], arguments: A) -> int:
    """Run a script, and return its exit code: 2 for wrong input, 1 for what failed later."""
    try:
        return main(arguments) or 0
    except OobleckError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)  # noqa: T201
        return 2 if isinstance(error, ConfigError) else 1


def make_room(path: Path | None, *, flag: str) -> None:
    """Make the folder of a file that will be written, before the work, so that its result is not lost.

    Raises:
        ConfigError: it cannot be made, or nothing can be written there.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: its folder cannot be made ({error.strerror}); choose another") from None
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; name a file, such as {path / 'result'}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written; choose another folder")


def make_room_for_picture(path: Path | None, *, flag: str, besides: tuple[str, ...] = ()) -> None:
    """Make the folder of a picture that will be drawn, or of a file with one of the endings besides.

    Raises:
        ConfigError: as of `make_room`; or the ending of its name is none of a picture that can be drawn.
    """
    if path is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase  # late: it takes its time, and draws the picture anyway

    endings = (*besides, *(f".{ending}" for ending in FigureCanvasBase.get_supported_filetypes()))
    if path.suffix.lower() not in endings:
        raise ConfigError(f"{flag} {path}: the ending says what is written; give one of {', '.join(endings)}")
    make_room(path, flag=flag)
