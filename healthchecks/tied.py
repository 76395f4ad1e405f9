"""Runs a module of this package as a child that does not outlive its parent.

A driver that hangs keeps its caller inside the kernel or a lock for ever. When the parent goes,
stopped or killed, nobody is left to end such a child, so the kernel is asked to:
`python -m healthchecks.tied PARENT_PID MODULE ARGUMENT...`.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tie(parent: int) -> bool:
    """Ask the kernel to kill this process when its parent goes; False if it has gone already.

    It is the parent's thread that counts: the one that started this child.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == parent


def main() -> int:
    """Tie, then be the module."""
    parent, module, *arguments = sys.argv[1:]
    if not tie(int(parent)):
        return 1
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
