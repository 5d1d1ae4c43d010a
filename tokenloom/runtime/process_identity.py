"""Which process a rank is, so that ranks on the same host can tell for certain that it has ended."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, as every process of the same host and the same PID namespace sees it.

    Attributes:
        place: the host since it was booted, and the PID namespace; "" where the system does not tell.
        pid: within that namespace.
        started: when it started, in clock ticks since the host was booted: a PID may be given again.
    """

    place: str
    pid: int
    started: str

    @staticmethod
    def own() -> ProcessIdentity:
        """This process."""
        pid = os.getpid()
        try:
            return ProcessIdentity(_place(), pid, _status(pid)[1])
        except OSError:
            return ProcessIdentity("", pid, "")

    def has_ended(self) -> bool:
        """Whether it has ended for certain; False where that cannot be told from here.

        What has ended has given up its GPU memory, its mappings and its kernels: the driver does so when it closes
        the process's files, before its parent can hear of the end.
        """
        try:
            if not self.place or self.place != _place():
                return False
            os.kill(self.pid, 0)  # asks only; a process of another user may be hidden in /proc
            state, started = _status(self.pid)
            alone = len(list((PROC / str(self.pid) / "task").iterdir())) <= 1  # or other threads live on
            return started != self.started or (state in "ZX" and alone)
        except ProcessLookupError:
            return True
        except OSError:
            return False


def _place() -> str:
    boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink(PROC / 'self/ns/pid')}"


def _status(pid: int) -> tuple[str, str]:
    """(state, when it started). The process's name comes before, in parentheses, and may hold anything."""
    fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]
