"""The admin port against clients that are slow, many, or send more than was asked for."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import until

from appliance.plan.adjustments import NO_ADJUSTMENTS
from appliance.plan.launch_plan import LaunchPlan
from appliance.serve import admin
from appliance.serve.admin import AdminServer, AdminSource
from appliance.serve.board import Board
from appliance.serve.health import Snapshot
from appliance.serve.ladder import Settings
from appliance.serve.machine import Phase, State


class Listening:
    """An admin port of an appliance that is ready, and the drains it asked for."""

    def __init__(self, plan: LaunchPlan, board: Board) -> None:
        snapshot = Snapshot(
            State(Phase.READY), Settings(plan, NO_ADJUSTMENTS), 0.0, 0.0, engine_alive=True
        )
        self.drains: list[str] = []
        self.server = AdminServer("127.0.0.1", 0)
        source = AdminSource(lambda: snapshot, lambda: 0.0, board, lambda: self.drains.append("d"))
        self.server.start(source)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=10)

    def ask(self, method: str, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        with contextlib.closing(connection):
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def send(self, request: bytes) -> bytes:
        """Send raw bytes and return everything that comes back until the connection ends."""
        with self.connect() as client:
            client.sendall(request)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while chunk := client.recv(65536):
                    answer += chunk
            return answer


@pytest.fixture
def listening(tmp_path: Path, plan: Callable[..., LaunchPlan]) -> Iterator[Listening]:
    """Return an admin port that answers."""
    made = Listening(plan(), Board.create(tmp_path / "board"))
    yield made
    made.server.close()


def test_admin_connection_that_trickles_is_cut(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "CONNECTION_S", 0.3)

    with listening.connect() as client:
        client.settimeout(0.1)
        ended = False
        for letter in b"GET /status" + b"x" * 60:
            try:
                client.sendall(bytes([letter]))
                ended = client.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
            if ended:
                break

    assert ended


def test_admin_probe_gets_in_whoever_holds_connections(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "MAX_CONNECTIONS", 3)
    others = set(threading.enumerate())  # such as those that tests before this one left

    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(listening.connect()) for _ in range(5)]
        status, body = listening.ask("GET", "/health/startup")
        first = held[0].recv(1)
        until(lambda: serving(others) <= 4, "threads of closed connections ended")

    assert (status, json.loads(body)["reason"]) == (200, "READY")
    assert first == b""


def serving(others: set[threading.Thread]) -> int:
    """Threads that serve a connection: those that have come, but for `others`."""
    return len(set(threading.enumerate()) - others)


def test_admin_answers_one_request_a_connection_so_that_a_body_is_never_a_request(
    listening: Listening,
) -> None:
    inner = b"POST /drain HTTP/1.1\r\nHost: x\r\n\r\n"
    length = b"Content-Length: %d\r\n\r\n" % len(inner)

    answer = listening.send(b"GET /health/live HTTP/1.1\r\nHost: x\r\n" + length + inner)

    assert answer.count(b"HTTP/1.1 ") == 1
    assert listening.drains == []


def test_admin_head_is_get_without_a_body(listening: Listening) -> None:
    answer = listening.send(b"HEAD /health/startup HTTP/1.1\r\nHost: x\r\n\r\n")

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == b""


def test_admin_huge_headers_are_refused(listening: Listening) -> None:
    answer = listening.send(b"GET /status HTTP/1.1\r\nX: " + b"y" * 70_000 + b"\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""
    assert listening.ask("GET", "/health/startup")[0] == 200


def test_admin_drain_asked_for_twice_is_asked_for_once(listening: Listening) -> None:
    answers = [listening.ask("POST", "/drain")[0] for _ in range(2)]

    assert answers == [202, 202]
    assert listening.drains == ["d"]
