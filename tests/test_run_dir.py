import os
import stat
from pathlib import Path

import pytest

from oobleck_jax.errors import ConfigError
from oobleck_jax.process_id import ProcessId
from oobleck_jax.run_dir import Contact, RunDir, read_contact


CONTACT = Contact(
    address="127.0.0.1:7000", token="secret", tls_authority=None, pid=7, agents={3: ProcessId(pid=8, began_s=1.5)}
)


def test_a_run_directory_has_one_coordinator_at_a_time(tmp_path: Path) -> None:
    words = rf"in use by a running coordinator \(process {os.getpid()}\)"
    with RunDir(tmp_path / "run"), pytest.raises(ConfigError, match=words):
        RunDir(tmp_path / "run")
    RunDir(tmp_path / "run").close()


def test_only_the_owner_can_read_how_to_reach_the_coordinator(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        with RunDir(tmp_path) as run_dir:
            run_dir.write_contact(CONTACT)
            run_dir.write_contact(CONTACT)
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE((tmp_path / "coordinator.json").stat().st_mode) == 0o600
    assert read_contact(tmp_path) == CONTACT


def test_where_no_coordinator_was_there_is_no_contact(tmp_path: Path) -> None:
    assert read_contact(tmp_path) is None
    (tmp_path / "coordinator.json").write_text("{")
    with pytest.raises(ConfigError, match=r"coordinator.json cannot be read"):
        read_contact(tmp_path)
