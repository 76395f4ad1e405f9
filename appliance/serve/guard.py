"""A small process between supervisor and engine that leaves nothing behind when either is killed.

The engine starts processes of its own, and they outlive it by minutes when it dies by SIGKILL. The
guard is their reaper: orphans are handed to it by the kernel. When the engine ends, or the
supervisor disappears (its end of the control socket closes), the guard kills what is left, waits
until the process table shows none of it, and only then ends. It runs as
`python -I -S guard.py FD COMMAND...`.

Protocol, one word list a line. Guard to supervisor: `pid N`, `exit RC` (negative: signal number),
`left PID:STATE ...` (not dead yet after SIGKILL), `gone`. Supervisor to guard: `term`, `kill`.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # -I -S leave only the standard library
from typing import TYPE_CHECKING

from appliance.serve import procfs

if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TRACKER_GRACE_S = 2.0
_REPORT_EVERY_S = 2.0
_POLL_S = 0.05


def prctl(option: int, value: int) -> None:
    """Set one attribute of this process in the kernel.

    Raises:
        OSError: If the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


class Guard:
    """Owns the engine's process and everything below it."""

    def __init__(self, control: socket.socket, command: Sequence[str]) -> None:
        """Keep the supervisor's socket and the engine's command line."""
        self._control = control
        self._command = tuple(command)
        self._engine: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Start the engine, stay until it and all that it started are gone; return 0."""
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        wake_read, wake_write = socket.socketpair()
        wake_write.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno())
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # A handler, not SIG_IGN: exec gives the engine the default back.
            signal.signal(number, _wake_only)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(wake_read, selectors.EVENT_READ)
        if self._spawn():
            self._serve(wake_read)
        self._sweep()
        self._tell("gone")
        return 0

    def _spawn(self) -> bool:
        guard = os.getpid()

        def in_child() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:  # the guard died between fork and prctl
                os._exit(1)

        try:
            self._engine = subprocess.Popen(
                self._command,
                start_new_session=True,
                preexec_fn=in_child,  # noqa: PLW1509 - one thread here
            )
        except OSError as error:
            sys.stderr.write(f"cannot start {self._command[0]}: {error.strerror}\n")
            sys.stderr.flush()
            self._tell("exit 127")
            return False
        self._tell(f"pid {self._engine.pid}")
        return True

    def _serve(self, wake: socket.socket) -> None:
        """Pass orders on until the engine has ended or must be killed."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is wake:
                    wake.recv(4096)
                elif not self._obey():
                    return
            if self._reap():
                return

    def _obey(self) -> bool:
        """Carry out what the supervisor asked; False means: kill now."""
        words = _receive(self._control).split()
        if not words or b"kill" in words:
            return False
        if b"term" in words and self._engine is not None:
            self._engine.send_signal(signal.SIGTERM)
        return True

    def _reap(self) -> bool:
        """Collect ended children; True once the engine is among them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if self._engine is not None and pid == self._engine.pid:
                code = os.waitstatus_to_exitcode(status)
                self._engine.returncode = code
                self._tell(f"exit {code}")
                return True

    def _sweep(self) -> None:
        """Kill what is left until nothing is, however long the kernel holds on to it."""
        session = self._engine.pid if self._engine is not None else None
        began = reported = time.monotonic()
        while True:
            self._reap()
            left = procfs.family(procfs.table(), root=os.getpid(), session=session)
            if not left:
                return
            now = time.monotonic()
            spared = now - began < _TRACKER_GRACE_S
            victims = [p for p in left if not (spared and procfs.is_resource_tracker(p.pid))]
            procfs.kill_all(victims)
            if now - reported >= _REPORT_EVERY_S:
                reported = now
                self._tell("left " + " ".join(f"{p.pid}:{p.state}" for p in left))
            time.sleep(_POLL_S)

    def _tell(self, line: str) -> None:
        try:
            self._control.sendall(line.encode() + b"\n")
        except OSError:
            return  # the supervisor is gone; the sweep goes on without it


def _receive(control: socket.socket) -> bytes:
    try:
        return control.recv(4096)
    except ConnectionResetError:
        return b""


def _wake_only(_number: int, _frame: object) -> None:
    """Do nothing: the wake-up socket has been written to by then."""


if __name__ == "__main__":
    raise SystemExit(Guard(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]).run())
