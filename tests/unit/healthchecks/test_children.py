"""Children with deadlines, and values that cross to and from them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from healthchecks.children import ChildTimeoutError, LineChild, child_environment
from healthchecks.codec import from_plain, to_plain
from healthchecks.facts import GpuFacts, HostFacts, LinkFacts


def python(code: str) -> LineChild:
    return LineChild([sys.executable, "-c", code])


def test_lines_come_one_by_one_and_then_the_end():
    child = python("print('a'); print('b')")

    assert [child.next_line(10.0), child.next_line(10.0), child.next_line(10.0)] == ["a", "b", None]
    assert child.finish(10.0) == 0
    assert child.stop()


def test_silent_child_is_left_at_the_deadline_and_killed():
    child = python("import time; time.sleep(60)")
    started = time.monotonic()

    with pytest.raises(ChildTimeoutError):
        child.next_line(0.2)

    assert child.stop()
    assert time.monotonic() - started < 3.0


def test_child_that_ignores_signals_is_killed_with_its_own_children():
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    child = python(code)
    grandchild = int(child.next_line(20.0))

    assert child.stop()

    deadline = time.monotonic() + 5.0
    while _alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _alive(grandchild)


def test_child_goes_with_a_parent_that_is_killed(tmp_path):
    (tmp_path / "sleeper.py").write_text(
        "import os, sys, time\nprint(os.getpid(), sys.argv[1], flush=True)\ntime.sleep(60)\n"
    )
    code = (
        "import time; from healthchecks.children import LineChild, module_argv;"
        "print(LineChild(module_argv('sleeper', 'word')).next_line(20), flush=True); time.sleep(60)"
    )
    parent = LineChild(
        [sys.executable, "-c", code], child_environment({"PYTHONPATH": path_of(tmp_path)})
    )
    pid, word = parent.next_line(20.0).split()

    assert (word, _alive(int(pid))) == ("word", True)
    assert parent.stop()  # kills the parent's group; the child has a group of its own

    deadline = time.monotonic() + 5.0
    while _alive(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _alive(int(pid))


def path_of(folder: Path) -> str:
    return os.pathsep.join((str(folder), str(Path(__file__).resolve().parents[3])))


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def test_stderr_is_kept_for_the_message():
    child = python("import sys; sys.exit('the reason')")
    child.next_line(10.0)
    child.finish(10.0)

    assert child.stderr_tail() == "the reason"
    child.stop()


def test_child_environment_makes_this_package_importable():
    child = LineChild(
        [sys.executable, "-c", "import healthchecks; print(healthchecks.__name__)"],
        child_environment(),
    )

    assert child.next_line(10.0) == "healthchecks"
    child.stop()


def test_facts_cross_and_come_back_equal():
    lanes = (LinkFacts(0, active=True, remote_bus_id="x"), LinkFacts(1, active=False))
    gpu = GpuFacts(
        0, compute_capability=(7, 0), links=lanes, process_pids=(1, 2), read_status={"a": "ok"}
    )
    host = HostFacts(gpus=(gpu,), environment={"X": "1"})

    assert from_plain(HostFacts, to_plain(host)) == host


@pytest.mark.parametrize(
    "plain",
    [
        {"index": "0"},
        {"index": True},
        {"index": None},
        {"index": 0, "compute_capability": [7]},
        {"index": 0, "persistence": 1},
    ],
)
def test_value_of_the_wrong_kind_is_refused(plain):
    with pytest.raises(TypeError):
        from_plain(GpuFacts, plain)


def test_keys_of_a_newer_version_are_left_out():
    assert from_plain(GpuFacts, {"index": 1, "colour": "green"}) == GpuFacts(1)
