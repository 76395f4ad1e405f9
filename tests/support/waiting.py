"""Waiting for a condition, ports that nobody listens on, and children that nobody took note of."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


def until(
    condition: Callable[[], T | None], what: str, limit_s: float = 60.0, pause_s: float = 0.02
) -> T:
    """Ask until the answer is truthy, and fail with `what` when time is up."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        answer = condition()
        if answer:
            return answer
        time.sleep(pause_s)
    pytest.fail(f"not within {limit_s:g} s: {what}")


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def zombies() -> list[str]:
    """Return children of this process that ended and were not taken note of."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if parent == str(os.getpid()) and state == "Z":
            found.append(entry.parent.name)
    return found
