"""Child processes that answer in lines and are never waited for longer than told."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KILL_WAIT_S = 1.0
"""How long a killed child may take to go; one that stays longer hangs inside the driver."""

_CHUNK = 65_536


class ChildTimeoutError(Exception):
    """The child wrote no line in time."""


class LineChild:
    """A child in its own process group that writes one line a step on stdout."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Start `argv`; stderr is kept aside for `stderr_tail`."""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop()
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def _stdout(self) -> int:
        if self._process.stdout is None:
            raise ValueError("the child has no stdout")
        return self._process.stdout.fileno()

    def next_line(self, timeout_s: float) -> str | None:
        """Return the next line without its end, or None once the child closed stdout.

        Raises:
            ChildTimeoutError: If neither happened in `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise ChildTimeoutError
            chunk = os.read(self._stdout, _CHUNK)
            if not chunk:
                return None
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode(errors="replace")

    def finish(self, timeout_s: float) -> int | None:
        """Return the exit status, negative for a signal; None if it still runs by then."""
        try:
            return self._process.wait(timeout=max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def stderr_tail(self, limit: int = 400) -> str:
        """Return the end of what the child wrote on stderr."""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - limit))
        return self._stderr.read().decode(errors="replace").strip()

    def stop(self) -> bool:
        """Kill the whole group; False when the child cannot be killed and is left to a reaper."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        gone = self.finish(KILL_WAIT_S) is not None
        self._selector.close()
        if gone:
            self._close()
        else:
            threading.Thread(target=self._reap, name=f"reap-{self.pid}", daemon=True).start()
        return gone

    def _reap(self) -> None:
        self._process.wait()
        self._close()

    def _close(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()


def module_argv(module: str, *arguments: str) -> list[str]:
    """Return the argv that runs a module of this package in a fresh interpreter.

    The child is tied to the thread that starts it: it is killed when that thread or this process
    ends, however it ends.
    """
    return [sys.executable, "-m", "healthchecks.tied", str(os.getpid()), module, *arguments]


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment with this package importable, plus `extra`."""
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(extra or {})}
