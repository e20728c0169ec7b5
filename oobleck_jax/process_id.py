"""Processes of this machine, named so that another process can find them again."""

import msgspec
import psutil


_SAME_S = 2.0  # when a process began is told with the error of the clock at that time


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """A process of this machine."""

    pid: int
    began_s: float  # since 1970: another process that has its number later began later


def process_id(process: psutil.Process) -> ProcessId:
    """Return how to find a process again.

    Raises:
        psutil.Error: it has ended.
    """
    return ProcessId(pid=process.pid, began_s=process.create_time())


def find_process(wanted: ProcessId, *, module: str) -> psutil.Process | None:
    """Return the process if it lives and runs this module; its number may belong to something else by now."""
    try:
        found = psutil.Process(wanted.pid)
        is_it = module in found.cmdline() and abs(found.create_time() - wanted.began_s) < _SAME_S
    except psutil.Error:
        return None
    return found if is_it and not has_ended(found) else None


def has_ended(process: psutil.Process) -> bool:
    if isinstance(process, psutil.Popen):
        return process.poll() is not None
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
