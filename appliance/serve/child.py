"""The engine's process as the supervisor sees it: start, output lines, signals, and its end.

Every order returns at once; what happens is told by two callbacks on threads of this module. The
end is told exactly once, at the latest `kill_timeout_s` after `kill`, even when a process of the
engine hangs in the driver and cannot die.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.serve import procfs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

KILL_TIMEOUT_S = 30.0
"""A process still there this long after SIGKILL hangs in the driver; only the host can help."""

LONGEST_LINE = 8192
_GUARD = Path(__file__).with_name("guard.py")


@dataclass(frozen=True)
class EngineEnd:
    """How the engine ended.

    Attributes:
        returncode: Exit status of the API server, negative for a signal; None when it never ended.
        leftover: `PID:STATE` of processes that survived SIGKILL.
    """

    returncode: int | None
    leftover: tuple[str, ...] = ()


class EngineProcess:
    """One run of the engine under its guard."""

    def __init__(
        self,
        on_line: Callable[[str], None],
        on_end: Callable[[EngineEnd], None],
        *,
        kill_timeout_s: float = KILL_TIMEOUT_S,
    ) -> None:
        """Keep the callbacks; `start` makes the process."""
        self._on_line = on_line
        self._on_end = on_end
        self._kill_timeout_s = kill_timeout_s
        self._control: socket.socket | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._returncode: int | None = None
        self._left: tuple[str, ...] = ()
        self._ended = False
        self._alive = False

    @property
    def pid(self) -> int | None:
        """Process id of the API server once the guard has told it."""
        return self._pid

    @property
    def alive(self) -> bool:
        """Whether the API server is known to run."""
        return self._alive

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start guard and engine.

        Raises:
            OSError: If the guard itself cannot be started.
        """
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe()
        try:
            self._guard = subprocess.Popen(
                (sys.executable, "-I", "-S", str(_GUARD), str(theirs.fileno()), *command),
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError:
            ours.close()
            os.close(output_read)
            raise
        finally:
            theirs.close()
            os.close(output_write)
        self._control = ours
        self._alive = True
        pump = threading.Thread(
            target=self._pump, args=(output_read,), name="engine-output", daemon=True
        )
        pump.start()
        threading.Thread(
            target=self._listen, args=(ours, pump), name="engine-control", daemon=True
        ).start()

    def terminate(self) -> None:
        """Ask the engine to end."""
        self._order(b"term\n")

    def kill(self) -> None:
        """Kill the engine and everything it started; the end is told within the time limit."""
        self._order(b"kill\n")
        timer = threading.Timer(self._kill_timeout_s, self._give_up)
        timer.daemon = True
        timer.start()

    def _order(self, line: bytes) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):  # the guard has ended; its end is told elsewhere
                self._control.sendall(line)

    def _pump(self, descriptor: int) -> None:
        """Hand on each line; a progress bar's rewrites of one line become its last state."""
        with open(descriptor, "rb", buffering=0) as pipe:
            rest = b""
            while chunk := pipe.read(65536):
                *lines, rest = (rest + chunk).split(b"\n")
                rest = rest[-LONGEST_LINE:]
                for line in lines:
                    self._hand_on(line)
            self._hand_on(rest)

    def _hand_on(self, line: bytes) -> None:
        text = line.rstrip(b"\r").rpartition(b"\r")[2][:LONGEST_LINE].decode(errors="replace")
        if text.strip():
            self._on_line(text.rstrip())

    def _listen(self, control: socket.socket, pump: threading.Thread) -> None:
        """Follow the guard until it says `gone` or is killed itself."""
        gone = False
        with control.makefile("r", errors="replace") as lines, contextlib.suppress(OSError):
            for line in lines:
                gone = self._note(line.split()) or gone
        control.close()
        if not gone:
            self._sweep_without_guard()
        if self._guard is not None:
            self._guard.wait()
        pump.join(timeout=2.0)
        self._tell_end()

    def _note(self, words: list[str]) -> bool:
        match words:
            case ["pid", number]:
                self._pid = int(number)
            case ["exit", number]:
                self._returncode = int(number)
                self._alive = False
            case ["left", *processes]:
                self._left = tuple(processes)
            case ["gone"]:
                self._left = ()
                return True
            case _:
                pass
        return False

    def _sweep_without_guard(self) -> None:
        """Finish the guard's work when the guard was killed: the engine's session must go."""
        deadline = time.monotonic() + self._kill_timeout_s
        while self._pid is not None and time.monotonic() < deadline:
            left = procfs.family(procfs.table(), root=self._pid, session=self._pid)
            root = [row for row in procfs.table() if row.pid == self._pid and row.state not in "ZX"]
            if not left and not root:
                self._left = ()
                return
            procfs.kill_all((*left, *root))
            self._left = tuple(f"{row.pid}:{row.state}" for row in (*left, *root))
            time.sleep(0.05)

    def _give_up(self) -> None:
        if not self._left:
            self._left = ("unknown:D",)
        self._tell_end()

    def _tell_end(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._alive = False
        self._on_end(EngineEnd(self._returncode, self._left))
