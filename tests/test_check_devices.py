"""The check for machines with accelerators works on any machine."""

import json
from pathlib import Path

import pytest

from scripts.check_devices import Arguments, main


@pytest.mark.process
def test_nodes_that_share_a_device_survive_in_mixed_precision(tmp_path: Path) -> None:
    result = tmp_path / "devices.json"
    arguments = Arguments(preset="gpt-test", nodes=(2,), kills=1, rounds=0, global_batch_size=None, json=result)
    assert main(arguments) == 0
    (survival,) = json.loads(result.read_text())["survival"]
    assert survival["kills"] == 1
    assert survival["violation"] is None
    assert survival["steps"] > 3
