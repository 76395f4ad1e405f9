"""The probe scripts as an orchestrator runs them, over a real socket."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from healthchecks import probes

KINDS = ("startup", "live", "ready")


class Admin:
    """Answers every connection with the same bytes, piece by piece."""

    def __init__(self, *pieces: bytes, pause_s: float = 0.0) -> None:
        self._pieces = pieces
        self._pause_s = pause_s
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.asked: list[str] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            with client:
                self.asked.append(client.recv(4096).decode().split("\r\n")[0])
                try:
                    for piece in self._pieces:
                        client.sendall(piece)
                        time.sleep(self._pause_s)
                except OSError:
                    continue

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)


def reply(status: int, **body: str) -> bytes:
    return f"HTTP/1.1 {status} X\r\nA: b\r\n\r\n{json.dumps(body)}".encode()


@pytest.fixture
def admin() -> Iterator[Callable[..., Admin]]:
    """Start an admin port with given answers."""
    made: list[Admin] = []

    def begin(*pieces: bytes, pause_s: float = 0.0) -> Admin:
        made.append(Admin(*pieces, pause_s=pause_s))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def script(repository: Path, kind: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = repository / "healthchecks/probes" / f"{kind}.py"
    return subprocess.run(
        (sys.executable, "-I", "-S", path, *arguments),
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_script_asks_for_its_kind_and_passes_on_200(
    repository: Path, admin: Callable[..., Admin], kind: str
) -> None:
    server = admin(reply(200, reason="READY", detail=""))

    done = script(repository, kind, f"--port={server.port}")

    assert (done.returncode, done.stdout, done.stderr) == (0, "READY\n", "")
    assert server.asked == [f"GET /health/{kind} HTTP/1.0"]


@pytest.mark.parametrize("kind", KINDS)
def test_script_fails_on_503_with_the_reason_on_one_line(
    repository: Path, admin: Callable[..., Admin], kind: str
) -> None:
    server = admin(reply(503, reason="NO_PROGRESS", detail="waiting\nfor 61 s"))

    done = script(repository, kind, "--url", f"http://127.0.0.1:{server.port}/")

    assert (done.returncode, done.stdout) == (1, "NO_PROGRESS waiting for 61 s\n")


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1\r\n\r\n"]
)
def test_answer_that_is_no_http_fails(admin: Callable[..., Admin], answer: bytes) -> None:
    server = admin(answer)

    with pytest.raises(OSError, match="no HTTP"):
        probes.ask("/health/live", "127.0.0.1", server.port, 5.0)


def test_other_status_fails_even_with_a_good_body(
    admin: Callable[..., Admin], capsys: pytest.CaptureFixture[str]
) -> None:
    server = admin(b"HTTP/1.1 404 X\r\n\r\n<html>")

    code = probes.probe("live", "127.0.0.1", server.port, 5.0)

    assert (code, capsys.readouterr().out) == (1, "HTTP 404\n")


def test_whole_answer_must_come_in_time_however_it_trickles(
    admin: Callable[..., Admin], capsys: pytest.CaptureFixture[str]
) -> None:
    server = admin(*(b"x" for _ in range(100)), pause_s=0.1)
    began = time.monotonic()

    code = probes.probe("live", "127.0.0.1", server.port, 0.4)

    assert code == 1
    assert capsys.readouterr().out == f"UNREACHABLE 127.0.0.1:{server.port}: timed out\n"
    assert time.monotonic() - began < 3.0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--what"],
        ["--port"],
        ["--port", "x"],
        ["--timeout=soon"],
        ["--url", "http://host"],
        ["live"],
    ],
)
def test_wrong_arguments_fail_with_1_and_the_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert probes.main("live", arguments) == 1

    line = capsys.readouterr().out
    assert line.startswith("USAGE ")
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "address"),
    [
        ('{"host": "0.0.0.0", "port": 9401}', ("127.0.0.1", 9401)),
        ('{"host": "::", "port": 9401}', ("::1", 9401)),
        ('{"host": "10.0.0.1", "port": 9401}', ("10.0.0.1", 9401)),
        ("{", ("127.0.0.1", 9400)),
        ("[]", ("127.0.0.1", 9400)),
        (None, ("127.0.0.1", 9400)),
    ],
)
def test_address_comes_from_the_run_file_and_else_is_the_default(
    tmp_path: Path, content: str | None, address: tuple[str, int]
) -> None:
    if content is not None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/admin.json").write_text(content)

    assert probes.address({"state-dir": str(tmp_path)}) == address


def test_address_told_wins_over_the_run_file(tmp_path: Path) -> None:
    told = {"state-dir": str(tmp_path), "port": "1"}

    assert probes.address(told) == ("127.0.0.1", 1)
    assert probes.address({"url": "http://[::1]:9/x"}) == ("::1", 9)
    assert probes.address({"host": "h"}) == ("h", 9400)


def test_probes_use_the_standard_library_only(repository: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import healthchecks.probes.ready;"
        "print(sorted(m for m in sys.modules if m.split('.')[0] not in sys.stdlib_module_names))"
    )

    done = subprocess.run(
        (sys.executable, "-I", "-S", "-c", code, repository),
        capture_output=True,
        text=True,
        check=True,
    )

    ours = ["__main__", "healthchecks", "healthchecks.probes", "healthchecks.probes.ready"]
    assert json.loads(done.stdout.replace("'", '"')) == ours
