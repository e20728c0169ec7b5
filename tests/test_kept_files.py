"""What is kept from run to run is removed when nobody used it for months, and nothing else is."""

import os
import re
import time
from pathlib import Path

import pytest

from oobleck_jax.kept_files import mark_used, remove_unused
from tests.ages import age


OURS = re.compile(r"[a-z]\.kept")


def kept(folder: Path, name: str, *, days: float) -> Path:
    path = folder / name
    path.touch()
    age(path, days=days)
    return path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_was_used_in_the_last_months_stays(tmp_path: Path) -> None:
    kept(tmp_path, "a.kept", days=91)
    kept(tmp_path, "b.kept", days=89)
    mark_used(kept(tmp_path, "c.kept", days=91))
    read = kept(tmp_path, "d.kept", days=91)
    os.utime(read, (time.time(), read.stat().st_mtime))  # as file systems do themselves
    remove_unused(tmp_path, OURS)
    assert names(tmp_path) == {"b.kept", "c.kept", "d.kept"}


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """The folder may be one that the user had before."""
    for name in ("a.kept.old", "thesis.kept", "A.kept"):
        kept(tmp_path, name, days=1000)
    (tmp_path / "b.kept").mkdir()
    age(tmp_path / "b.kept", days=1000)
    remove_unused(tmp_path, OURS)
    assert names(tmp_path) == {"a.kept.old", "thesis.kept", "A.kept", "b.kept"}


def test_what_cannot_be_removed_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is read-only, or another process has just removed the file."""

    def refuse(path: Path) -> None:
        if path.name == "a.kept":
            raise PermissionError(13, "Permission denied")
        unlink(path)
        unlink(path)

    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", refuse)
    for name in ("a.kept", "b.kept", "c.kept"):
        kept(tmp_path, name, days=91)
    remove_unused(tmp_path, OURS)
    assert names(tmp_path) == {"a.kept"}


def test_without_a_folder_there_is_nothing_to_do(tmp_path: Path) -> None:
    remove_unused(tmp_path / "absent", OURS)
    mark_used(tmp_path / "absent")
    (tmp_path / "file").touch()
    remove_unused(tmp_path / "file", OURS)
    assert names(tmp_path) == {"file"}
