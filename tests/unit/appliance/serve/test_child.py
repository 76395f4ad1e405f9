"""Real processes under the real guard: output, ends, signals, kills, orphans."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.serve import procfs
from appliance.serve.child import EngineEnd, EngineProcess

LIMIT_S = 20.0
FAMILY = (
    "import subprocess, sys, time, os\n"
    'core = \'import subprocess, sys; subprocess.run([sys.executable, "-c", '
    '"import time; time.sleep(300)"])\'\n'
    "subprocess.Popen([sys.executable, '-c', core])\n"
    "print('up', flush=True)\n"
    "time.sleep(300)\n"
)


class Child:
    """An engine process whose lines and end a test can wait for."""

    def __init__(self, kill_timeout_s: float = 30.0) -> None:
        self.lines: queue.Queue[str] = queue.Queue()
        self.ends: queue.Queue[EngineEnd] = queue.Queue()
        self.process = EngineProcess(self.lines.put, self.ends.put, kill_timeout_s=kill_timeout_s)

    def start(self, code: str, **environment: str) -> None:
        self.process.start((sys.executable, "-c", code), {**os.environ, **environment})

    def end(self) -> EngineEnd:
        return self.ends.get(timeout=LIMIT_S)

    def said(self) -> list[str]:
        return [self.lines.get_nowait() for _ in range(self.lines.qsize())]


@pytest.fixture
def child() -> Iterator[Child]:
    """A child that is gone after the test."""
    made = Child()
    yield made
    made.process.kill()


def living(session: int) -> set[int]:
    return {row.pid for row in procfs.table() if row.session == session and row.state not in "ZX"}


def wait_until_gone(session: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while living(session):
        assert time.monotonic() < deadline, f"session {session} still has {living(session)}"
        time.sleep(0.02)


def parent_of(pid: int) -> int:
    return next(row.parent for row in procfs.table() if row.pid == pid)


@pytest.mark.parametrize("status", [0, 3])
def test_child_tells_the_exit_status(child: Child, status: int) -> None:
    child.start(f"raise SystemExit({status})")

    assert child.end() == EngineEnd(status)
    assert not child.process.alive


def test_child_tells_the_signal_it_died_of(child: Child) -> None:
    child.start("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")

    assert child.end() == EngineEnd(-signal.SIGSEGV)


def test_child_that_cannot_be_started_ends_with_127(child: Child) -> None:
    child.process.start(("/nowhere/engine",), {})

    assert child.end() == EngineEnd(127)
    assert child.said() == ["cannot start /nowhere/engine: No such file or directory"]


def test_child_hands_on_both_outputs_line_by_line(child: Child) -> None:
    child.start(
        "import sys\n"
        "sys.stderr.write('err 1\\n'); sys.stderr.flush()\n"
        "sys.stdout.write('\\n  \\nloading: 1%\\rloading: 99%\\r\\n')\n"
        "sys.stdout.write('x' * 20000 + '\\n'); sys.stdout.write('no newline \\xff')\n",
        PYTHONIOENCODING="latin-1",
    )
    child.end()

    said = child.said()

    assert said[0] == "err 1"
    assert said[1] == "loading: 99%"
    assert set(said[2]) == {"x"}
    assert len(said[2]) == 8192
    assert said[3] == "no newline \ufffd"


def test_child_gets_the_environment_it_is_given_and_no_other(child: Child) -> None:
    code = "import os; print(sorted(k for k in os.environ if k not in ('LC_CTYPE',)))"
    child.process.start((sys.executable, "-c", code), {"ONLY": "this"})
    child.end()

    assert child.said() == ["['ONLY']"]


def test_child_ends_with_its_own_status_when_it_is_asked_to(child: Child) -> None:
    child.start(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print('up', flush=True)\n"
        "time.sleep(300)\n"
    )
    child.lines.get(timeout=LIMIT_S)

    child.process.terminate()

    assert child.end() == EngineEnd(7)


def test_child_has_default_signal_handling(child: Child) -> None:
    child.start("import signal; print(signal.getsignal(15) is signal.SIG_DFL, signal.getsignal(2))")
    child.end()

    assert child.said() == ["True <built-in function default_int_handler>"]


def test_kill_ends_the_whole_family_even_when_it_is_stopped(child: Child) -> None:
    child.start(FAMILY)
    child.lines.get(timeout=LIMIT_S)
    pid = child.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    child.process.kill()

    assert child.end() == EngineEnd(-signal.SIGKILL)
    assert living(pid) == set()


def test_death_of_the_engine_takes_its_orphans_along(child: Child) -> None:
    child.start(FAMILY)
    child.lines.get(timeout=LIMIT_S)
    pid = child.process.pid
    assert pid is not None
    assert len(living(pid)) >= 2

    os.kill(pid, signal.SIGKILL)

    assert child.end() == EngineEnd(-signal.SIGKILL)
    assert living(pid) == set()


def test_death_of_the_guard_takes_the_family_along(child: Child) -> None:
    child.start(FAMILY)
    child.lines.get(timeout=LIMIT_S)
    pid = child.process.pid
    assert pid is not None

    os.kill(parent_of(pid), signal.SIGKILL)

    assert child.end() == EngineEnd(None)
    assert living(pid) == set()


def test_child_that_cannot_be_killed_is_given_up_in_time() -> None:
    child = Child(kill_timeout_s=0.3)
    child.start(FAMILY)
    child.lines.get(timeout=LIMIT_S)
    pid = child.process.pid
    assert pid is not None
    guard = parent_of(pid)
    os.kill(guard, signal.SIGSTOP)  # nobody carries the kill out, as in an uninterruptible sleep
    began = time.monotonic()

    child.process.kill()
    end = child.end()
    took_s = time.monotonic() - began
    os.kill(guard, signal.SIGCONT)

    assert end == EngineEnd(None, ("unknown:D",))
    assert took_s < 2.0
    wait_until_gone(pid)
    with contextlib.suppress(queue.Empty):
        assert child.ends.get(timeout=0.2) is None, "the end is told once"


def test_resource_tracker_outlives_the_engine_and_removes_its_shared_memory(child: Child) -> None:
    child.start(
        "from multiprocessing import shared_memory\n"
        "import time\n"
        "block = shared_memory.SharedMemory(create=True, size=4096)\n"
        "print(block.name, flush=True)\n"
        "time.sleep(300)\n"
    )
    path = Path("/dev/shm") / child.lines.get(timeout=LIMIT_S)  # noqa: S108 - where it lies
    assert path.exists()
    pid = child.process.pid
    assert pid is not None

    os.kill(pid, signal.SIGKILL)
    child.end()

    assert not path.exists()
    assert living(pid) == set()


def test_stat_line_with_spaces_and_brackets_in_the_name_is_read() -> None:
    tail = " ".join(str(number) for number in range(7, 53))
    row = procfs.parse_stat(f"12 (VLLM::Worker (0) x) D 3 4 5 {tail}")

    assert row == procfs.Process(pid=12, parent=3, session=5, state="D", started=22)


def test_family_is_what_descends_from_the_root_or_shares_the_session() -> None:
    def row(pid: int, parent: int, session: int, state: str = "S") -> procfs.Process:
        return procfs.Process(pid, parent, session, state, 0)

    rows = [
        row(1, 0, 1), row(10, 1, 10), row(11, 10, 11), row(12, 11, 11), row(13, 12, 13),
        row(14, 1, 11), row(15, 14, 15), row(16, 10, 11, "Z"), row(17, 10, 11, "D"), row(20, 1, 20),
    ]  # fmt: skip

    below = procfs.family(rows, root=10, session=None)
    both = procfs.family(rows, root=10, session=11)

    assert {each.pid for each in below} == {11, 12, 13, 17}
    assert {each.pid for each in both} == {11, 12, 13, 14, 15, 17}
