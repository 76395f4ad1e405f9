"""Which processes belong to the engine, read from /proc.

Standard library only, nothing of the package but this file's siblings of the same kind: the guard
process imports it with `python -I -S`.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_TRACKER = b"multiprocessing.resource_tracker"


@dataclass(frozen=True)
class Process:
    """One row of the process table.

    Attributes:
        pid: Process id.
        parent: Id of its parent.
        session: Id of its session, which is the pid of the session's leader.
        state: Letter of proc(5): `R`, `S`, `D`, `Z`, ...
        started: Clock ticks between boot and its start; tells a reused pid from the old one.
    """

    pid: int
    parent: int
    session: int
    state: str
    started: int


def parse_stat(text: str) -> Process:
    """Return the row of one `/proc/PID/stat`; the name may hold spaces and brackets."""
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Process(
        pid=int(head.split(" ", 1)[0]),
        parent=int(fields[1]),
        session=int(fields[3]),
        state=fields[0],
        started=int(fields[19]),
    )


def table(proc: Path = Path("/proc")) -> tuple[Process, ...]:
    """Return every process this pid namespace shows; those that end meanwhile are left out."""
    rows: list[Process] = []
    for name in os.listdir(proc):  # noqa: PTH208 - names only
        if name.isdigit():
            try:
                rows.append(parse_stat((proc / name / "stat").read_text(errors="replace")))
            except (OSError, IndexError, ValueError):
                continue  # it ended between the listing and the read
    return tuple(rows)


def family(rows: Iterable[Process], *, root: int, session: int | None) -> tuple[Process, ...]:
    """Return the living processes below `root` and those of `session`, with all their descendants.

    `root` itself is not part of it. Zombies are left out: they hold nothing any more.
    """
    children: dict[int, list[Process]] = {}
    found: dict[int, Process] = {}
    for row in rows:
        children.setdefault(row.parent, []).append(row)
        if session is not None and row.session == session:
            found[row.pid] = row
    queue = [root, *found]
    while queue:
        for row in children.get(queue.pop(), ()):
            if row.pid not in found:
                found[row.pid] = row
                queue.append(row.pid)
    return tuple(row for row in found.values() if row.state not in "ZX" and row.pid != root)


def is_resource_tracker(pid: int) -> bool:
    """Tell whether a process is Python's own helper that removes shared memory left behind.

    It ends by itself as soon as the processes it serves are gone; it must outlive them to clean up.
    """
    try:
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def kill_all(rows: Iterable[Process]) -> None:
    """Send SIGKILL to every process given; those already gone are passed over."""
    for row in rows:
        try:
            os.kill(row.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
