"""Turn this process into another program that ends with its parent, not before, and stays on its cores.

    python child.py --parent PID [--cores 0,1] -- COMMAND...

It runs between fork and exec in a process of its own, which is safe where a `preexec_fn` in a process with threads is
not, and takes some 10 ms when started with `-I -S`. Standard library only.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence


_PR_SET_PDEATHSIG = 1  # Linux: the signal survives exec


def child_command(command: Sequence[str], *, cores: tuple[int, ...]) -> tuple[str, ...]:
    """Return the command that runs `command` as a child of this process, bound to its life and to some cores."""
    options = ["--parent", str(os.getpid())]
    if cores:
        options += ["--cores", ",".join(map(str, cores))]
    return (sys.executable, "-I", "-S", __file__, *options, "--", *command)


def _main(argv: list[str]) -> None:
    split = argv.index("--")
    options, command = argv[:split], argv[split + 1 :]
    values = dict(zip(options[::2], options[1::2], strict=True))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if "--cores" in values:
            os.sched_setaffinity(0, {int(core) for core in values["--cores"].split(",")})
    # Slurm and systemd send the SIGTERM of a job to all of its processes; to leave in good order is up to the parent.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.getppid() != int(values["--parent"]):
        sys.exit("the parent is gone already")  # before prctl: no signal would come any more
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main(sys.argv[1:])
