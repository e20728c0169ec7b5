import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from oobleck_jax.checkpoint.scratch import scratch_folder


CODE = """
import time
from oobleck_jax.checkpoint.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "inner").mkdir()
    print(folder, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_has_left_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, env=environment, text=True) as other:
        try:
            assert other.stdout is not None
            theirs = Path(other.stdout.readline().strip())
            assert theirs.parent == tmp_path
            with scratch_folder() as mine, scratch_folder() as another:
                assert set(tmp_path.iterdir()) == {theirs, mine, another}
        finally:
            other.send_signal(signal.SIGKILL)
    (tmp_path / "notes").touch()
    with scratch_folder() as mine:
        assert set(tmp_path.iterdir()) == {mine, tmp_path / "notes"}
    assert list(tmp_path.iterdir()) == [tmp_path / "notes"]


def test_what_another_host_has_in_a_place_that_both_share_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks of others are not seen there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    here = socket.gethostname()
    for host in (f"{here}0", f"a{here}", here):
        (tmp_path / f"oobleck-scratch-abc@{host}").mkdir()
    with scratch_folder() as mine:
        assert mine.name.endswith(f"@{here}")
    assert {path.name for path in tmp_path.iterdir()} == {
        f"oobleck-scratch-abc@{here}0",
        f"oobleck-scratch-abc@a{here}",
    }
