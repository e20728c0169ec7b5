import os
import signal
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
