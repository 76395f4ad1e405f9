"""The gateway inside a real uvicorn, asked by a real client."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from appliance.serve.board import Board, Slot, Traffic
from appliance.serve.handoff import TOKEN_HEADER, VARIABLE, Handoff
from appliance.serve.middleware import Gateway

ORDERS = Handoff(
    board="",
    token="run-token",  # noqa: S106 - of this test
    api_keys_file=None,
    max_request_bytes=2048,
    max_concurrent_requests=2,
    requests_per_minute_per_key=0,
)


class Echo:
    """An app that answers with the body it got, and holds /slow until it is released."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.seen: list[tuple[str, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.seen.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while scope["path"] == "/slow" and not self.release.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": body})


class Serving:
    """A gateway that listens, its board and its app."""

    def __init__(self, port: int, board: Board, app: Echo) -> None:
        self.port = port
        self.board = board
        self.app = app

    def ask(
        self, path: str = "/v1/x", body: Any = b"hi", **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            chunked = not isinstance(body, bytes)
            connection.request("POST", path, body, named, encode_chunked=chunked)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, text, {k.lower(): v for k, v in answer.getheaders()}

    def code(self, **headers: str) -> tuple[int, str]:
        status, text, _ = self.ask(**headers)
        return status, "" if status == 200 else json.loads(text)["error"]["code"]

    def wait_for(self, slot: Slot, value: int) -> None:
        for _ in range(500):
            if self.board.read(slot) == value:
                return
            threading.Event().wait(0.01)
        pytest.fail(f"{slot.name} is {self.board.read(slot)}, not {value}")


Serve = Callable[..., Serving]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start a gateway with changed orders: `serve(max_request_bytes=10)`."""
    with contextlib.ExitStack() as stack:

        def begin(*, body_idle_s: float = 30.0, **orders: Any) -> Serving:
            board = Board.create(tmp_path / "board")
            board.traffic = Traffic.OPEN
            changed = replace(ORDERS, board=str(tmp_path / "board"), **orders)
            changed.write(tmp_path / "handoff.json")
            monkeypatch.setenv(VARIABLE, str(tmp_path / "handoff.json"))
            app = Echo()
            gateway = Gateway(app, body_idle_s=body_idle_s)
            config = uvicorn.Config(gateway, log_level="error", timeout_graceful_shutdown=1)
            server = uvicorn.Server(config)
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()

            def end() -> None:
                app.release.set()
                server.should_exit = True
                thread.join(10)

            stack.callback(end)
            return Serving(listener.getsockname()[1], board, app)

        yield begin


@pytest.mark.parametrize(
    "path", ["/scale_elastic_ep", "/collective_rpc", "/sleep", "/v1/load_lora_adapter/"]
)
def test_routes_that_manage_the_engine_do_not_exist_for_clients(serve: Serve, path: str) -> None:
    serving = serve()

    status, text, _ = serving.ask(path)

    assert (status, json.loads(text)["error"]["code"]) == (404, "not_found")
    assert serving.app.seen == []
    assert serving.board.read(Slot.CLOSED_ROUTE) == 1
    assert serving.ask("/v1/models")[0] == 200


def test_gateway_refuses_to_be_built_without_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)

    with pytest.raises(RuntimeError, match="appliance serve"):
        Gateway(Echo())


def test_gateway_lets_a_request_through_with_its_whole_body(serve: Serve) -> None:
    gateway = serve()

    status, body, _ = gateway.ask(body=b"x" * 2048)

    assert (status, body) == (200, b"x" * 2048)
    assert gateway.board.read(Slot.ACCEPTED) == 1
    gateway.wait_for(Slot.IN_FLIGHT, 0)


@pytest.mark.parametrize(
    ("traffic", "code", "slot"),
    [(Traffic.CLOSED, "not_ready", "CLOSED"), (Traffic.DRAINING, "draining", "DRAINING")],
)
def test_gateway_turns_requests_away_while_traffic_is_not_open(
    serve: Serve, traffic: Traffic, code: str, slot: str
) -> None:
    gateway = serve()
    gateway.board.traffic = traffic

    status, text, headers = gateway.ask()
    own = gateway.ask(**{TOKEN_HEADER: "run-token"})[0]
    guessed = gateway.ask(**{TOKEN_HEADER: "guess"})[0]
    health = gateway.ask("/health")[0]

    assert (status, json.loads(text)["error"]["code"]) == (503, code), slot
    assert headers["connection"] == "close"
    assert headers["retry-after"] == "5"
    assert (own, guessed, health) == (200, 503, 200)
    assert gateway.board.read(Slot.TURNED_AWAY) == 2


def test_gateway_asks_for_keys_but_not_on_health_nor_of_preflights(
    serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("alpha\n")
    gateway = serve(api_keys_file=str(tmp_path / "keys"))

    wrong = [
        gateway.code(**headers)
        for headers in ({}, {"Authorization": "Bearer beta"}, {"Authorization": "Basic alpha"},
                        {"Authorization": "Bearer "}, {"Authorization": "alpha"})
    ]  # fmt: skip
    right = [
        gateway.code(Authorization="Bearer alpha"), gateway.code(Authorization="bearer  alpha"),
    ]  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10)
    with contextlib.closing(connection):
        connection.request("OPTIONS", "/v1/x")
        preflight = connection.getresponse().status

    assert set(wrong) == {(401, "invalid_api_key")}
    assert right == [(200, ""), (200, "")]
    assert preflight == 200
    assert gateway.ask("/health")[0] == 200
    assert gateway.ask("/metrics")[0] == 401
    assert gateway.board.read(Slot.UNAUTHORIZED) == 6


def test_gateway_answers_413_by_header_and_by_what_comes(serve: Serve) -> None:
    gateway = serve()
    chunks = [b"y" * 1024] * 40

    by_header = gateway.code()
    announced = gateway.ask(body=b"x" * 2049)
    counted = gateway.ask(body=iter(chunks), Transfer_Encoding="chunked")

    assert by_header == (200, "")
    for status, text, headers in (announced, counted):
        assert (status, json.loads(text)["error"]["code"]) == (413, "request_too_large")
        assert headers["connection"] == "close"
    assert gateway.board.read(Slot.TOO_LARGE) == 2
    assert [path for path, _ in gateway.app.seen] == ["/v1/x"]


def test_gateway_answers_429_above_the_limit_of_requests_in_flight(serve: Serve) -> None:
    gateway = serve()
    callers = [threading.Thread(target=gateway.ask, args=("/slow",)) for _ in range(2)]
    for caller in callers:
        caller.start()
    gateway.wait_for(Slot.IN_FLIGHT, 2)

    status, text, headers = gateway.ask()
    own = gateway.ask(**{TOKEN_HEADER: "run-token"})[0]
    gateway.app.release.set()
    for caller in callers:
        caller.join()
    gateway.wait_for(Slot.IN_FLIGHT, 0)

    assert (status, json.loads(text)["error"]["code"]) == (429, "too_many_requests")
    assert int(headers["retry-after"]) >= 1
    assert own == 200
    assert gateway.code() == (200, "")


def test_gateway_limits_the_rate_of_each_key(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alpha\nbeta\n")
    gateway = serve(api_keys_file=str(tmp_path / "keys"), requests_per_minute_per_key=2)

    alpha = [gateway.ask(Authorization="Bearer alpha") for _ in range(3)]
    beta = gateway.code(Authorization="Bearer beta")

    assert [status for status, _, _ in alpha] == [200, 200, 429]
    assert 1 <= int(alpha[2][2]["retry-after"]) <= 30
    assert beta == (200, "")


def test_gateway_gives_up_a_body_that_stops_coming(serve: Serve) -> None:
    gateway = serve(body_idle_s=0.2)
    head = b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nonly this"

    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as client:
        client.sendall(head)
        answer = client.recv(4096)

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert gateway.board.read(Slot.TOO_SLOW) == 1
    gateway.wait_for(Slot.IN_FLIGHT, 0)
    assert gateway.app.seen == []


def test_gateway_forgets_a_client_that_leaves_before_its_body_is_whole(serve: Serve) -> None:
    gateway = serve()

    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as client:
        client.sendall(b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nonly this")
        gateway.wait_for(Slot.IN_FLIGHT, 1)

    gateway.wait_for(Slot.IN_FLIGHT, 0)
    assert gateway.app.seen == []


def test_gateway_closes_connections_with_answers_that_begin_while_draining(serve: Serve) -> None:
    gateway = serve(body_idle_s=10.0)
    text = b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab"

    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as client:
        client.sendall(text)
        gateway.wait_for(Slot.IN_FLIGHT, 1)
        gateway.board.traffic = Traffic.DRAINING
        client.sendall(b"cd")
        answer = b""
        while chunk := client.recv(4096):
            answer += chunk

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in answer.lower()
    assert b"abcd" in answer


def test_websocket_is_refused_before_it_is_accepted_and_passes_when_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board.create(tmp_path / "board")
    replace(ORDERS, board=str(tmp_path / "board")).write(tmp_path / "handoff.json")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "handoff.json"))
    reached: list[str] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        reached.append(scope["path"])

    async def talk() -> list[Any]:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
        await Gateway(app)(scope, receive, send)
        board.traffic = Traffic.OPEN
        await Gateway(app)(scope, receive, send)
        return sent

    sent = asyncio.run(talk())

    assert [(m["type"], m["code"]) for m in sent] == [("websocket.close", 1008)]
    assert reached == ["/v1/realtime"]


def test_board_of_another_layout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "board").write_bytes(bytes(128))

    with pytest.raises(ValueError, match="not a board"):
        Board.attach(tmp_path / "board")


def test_handoff_is_private_and_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "handoff.json"

    ORDERS.write(path)

    assert Handoff.read(path) == ORDERS
    assert path.stat().st_mode & 0o777 == 0o600


def test_handoff_with_other_fields_is_refused(tmp_path: Path) -> None:
    (tmp_path / "handoff.json").write_text('{"board": "x", "extra": 1}')

    with pytest.raises(ValueError, match="not a handoff"):
        Handoff.read(tmp_path / "handoff.json")


def test_gateway_without_keys_has_one_rate_whatever_key_is_made_up(serve: Serve) -> None:
    gateway = serve(requests_per_minute_per_key=2)

    statuses = [gateway.ask(Authorization=f"Bearer made-up-{n}")[0] for n in range(3)]

    assert statuses == [200, 200, 429]


def test_gateway_gives_up_a_body_that_only_trickles(serve: Serve) -> None:
    gateway = serve(body_idle_s=0.5)
    head = b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"

    with socket.create_connection(("127.0.0.1", gateway.port), timeout=0.1) as client:
        client.sendall(head)
        answer = b""
        for _ in range(30):
            client.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                answer = client.recv(4096)
                break

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert gateway.board.read(Slot.TOO_SLOW) == 1


def test_gateway_clients_without_a_key_take_no_places(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alpha\n")
    gateway = serve(api_keys_file=str(tmp_path / "keys"))
    head = b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx"

    with contextlib.ExitStack() as stack:
        for _ in range(4):
            address = ("127.0.0.1", gateway.port)
            stack.enter_context(socket.create_connection(address, timeout=10)).sendall(head)
        gateway.wait_for(Slot.IN_FLIGHT, 4)
        code = gateway.code(Authorization="Bearer alpha")

    assert code == (200, "")
