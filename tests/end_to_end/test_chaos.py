"""A real run under fifteen random strikes."""

import json
import signal
import subprocess
import sys

import pytest

from tests.end_to_end.training_runs import PROGRAMS, ROOT, environment


@pytest.mark.process
@pytest.mark.timeout(600)
def test_fifteen_strikes_are_survived_and_change_nothing_T2(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "chaos.py"), "--seed", "1", "--incidents", "15"]
    command += ["--folder", str(tmp_path), "--programs", str(PROGRAMS), "--json", str(tmp_path / "result.json")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment()
    ) as chaos:
        try:
            out, _ = chaos.communicate(timeout=570)
        except BaseException:
            chaos.send_signal(signal.SIGINT)  # it ends what it has started
            chaos.wait(timeout=20)
            raise
    told = json.loads((tmp_path / "result.json").read_text()) if chaos.returncode in (0, 1) else {}
    assert told == {"incidents": 15, "survived": 15, "violations": []}, out
