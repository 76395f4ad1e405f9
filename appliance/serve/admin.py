"""The admin port: probes, status, plan, metrics and drain over HTTP.

Every answer is made from the last published snapshot: nothing here waits for the engine, the gate
or a GPU, so the probes answer in milliseconds whatever hangs.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar, cast

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.serve import health
from appliance.serve.board import Board, Slot
from appliance.serve.machine import Phase
from appliance.serve.metrics import Exposition, package_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.serve.health import Snapshot, Verdict

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_Request = socket.socket | tuple[bytes, socket.socket]  # the second is for datagrams only
_OK, _UNAVAILABLE = 200, 503

CONNECTION_S = 10.0
"""A whole connection, which is one request, takes at most this long."""

MAX_CONNECTIONS = 64
"""One more, and the oldest is cut: a probe must get in whoever holds the others."""


@dataclass(frozen=True)
class AdminSource:
    """What the admin port reads, and the one thing it may ask for."""

    snapshot: Callable[[], Snapshot]
    beat_age_s: Callable[[], float]
    board: Board
    request_drain: Callable[[], None]


class AdminServer:
    """Listens from construction on, answers from `start` on."""

    def __init__(self, host: str, port: int) -> None:
        """Take the port.

        Raises:
            ApplianceError: 12 if the port is taken or the address is not this machine's.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server_class = type("_Server", (_Server,), {"address_family": family})
        try:
            self._server: _Server = server_class((host, port), _Handler)
        except OSError as error:
            raise ApplianceError(
                ExitCode.CONTAINER, listen_fault("server.admin_port", host, port, error)
            ) from error

    @property
    def port(self) -> int:
        """The port in use, told by the kernel."""
        return int(self._server.server_address[1])

    def start(self, source: AdminSource) -> None:
        """Answer from now on."""
        self._server.source = source
        threading.Thread(target=self._server.serve_forever, name="admin", daemon=True).start()

    def close(self) -> None:
        """Stop answering and give the port back."""
        if self._server.source is not None:
            self._server.shutdown()
        self._server.server_close()


def check_port_free(host: str, port: int, key: str = "server.port") -> None:
    """Bind the port of a key once, so that a taken one is known before anything is loaded.

    Raises:
        ApplianceError: 12 if the port is taken or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise ApplianceError(
                ExitCode.CONTAINER, listen_fault(key, host, port, error)
            ) from error


def listen_fault(key: str, host: str, port: int, error: OSError) -> Fault:
    """Say why nothing can listen there."""
    what = "must be an address and port this process can listen on"
    fix = f"stop the other listener (`ss -ltnp 'sport = :{port}'`) or change {key}"
    return Fault(
        "PORT_UNAVAILABLE", f"{key} {host}:{port}", what, error.strerror or str(error), fix
    )


def status_body(source: AdminSource, now: float) -> dict[str, Any]:
    """Return what `/status` says."""
    snapshot, board = source.snapshot(), source.board
    state, plan = snapshot.state, snapshot.settings.plan
    beat = source.beat_age_s()
    return {
        "version": package_version(),
        "phase": state.phase.value,
        "phase_seconds": round(now - snapshot.phase_since, 1),
        "started_at": snapshot.started_at,
        "probes": {
            "startup": asdict(health.startup(snapshot)),
            "live": asdict(health.live(snapshot, beat_age_s=beat)),
            "ready": asdict(health.ready(snapshot, beat_age_s=beat)),
        },
        "model": {"served_name": plan.model.served_name, "path": plan.model.path},
        "api": {"host": plan.server.host, "port": plan.server.port},
        "engine": {
            "pid": snapshot.engine_pid,
            "alive": snapshot.engine_alive,
            "attempt": state.attempt,
        },
        "safer_settings": list(snapshot.rungs),
        "canary": None if snapshot.canary is None else asdict(snapshot.canary),
        "gate": snapshot.gate,
        "fault": None if state.fault is None else str(state.fault),
        "gpu_fault": None if state.latched is None else str(state.latched),
        "exit_code": None if state.exit_code is None else int(state.exit_code),
        "requests": {slot.name.lower(): board.read(slot) for slot in _REQUEST_SLOTS},
        "no_progress_seconds": round(snapshot.watch.waited_s, 1),
        "recent_ends": snapshot.recent_ends,
        "config": {
            "path": plan.config_path,
            "sha256": plan.config_sha256,
            "drift": snapshot.config_drift,
        },
    }


_REQUEST_SLOTS = tuple(slot for slot in Slot if slot not in {Slot.MAGIC, Slot.TRAFFIC})


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    source: AdminSource | None = None

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self._guard = threading.Lock()
        self._since: dict[_Request, float] = {}
        self._drain_asked = False
        super().__init__(address, handler)

    def ask_drain(self) -> None:
        """Ask once: a second stop would give up the requests in flight."""
        with self._guard:
            first, self._drain_asked = not self._drain_asked, True
        if first and self.source is not None:
            self.source.request_drain()

    def process_request(self, request: _Request, client_address: object) -> None:
        with self._guard:
            if len(self._since) >= MAX_CONNECTIONS:
                oldest = next(iter(self._since))  # in the order of coming
                del self._since[oldest]
                _cut(oldest)
            self._since[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: _Request) -> None:
        with self._guard:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut connections that take too long, byte by byte or not at all."""
        now = time.monotonic()
        with self._guard:
            late = [each for each, since in self._since.items() if now - since > CONNECTION_S]
        for each in late:
            _cut(each)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        return  # a client that left in the middle of its answer is no event


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "appliance"
    sys_version = ""
    timeout = CONNECTION_S
    routes: ClassVar[dict[str, Callable[[AdminSource], tuple[int, str, bytes]]]] = {}

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.close_connection = True  # what comes after is neither read nor taken for a request
        path = self.path.partition("?")[0]
        route = self.routes.get(path)
        source = self._source()
        if route is None or source is None:
            self._send(404, "application/json", _json({"reason": "NO_SUCH_PATH", "path": path}))
            return
        self._send(*route(source))

    def do_POST(self) -> None:
        self.close_connection = True  # whatever body there is stays unread
        source = self._source()
        if self.path != "/drain" or source is None:
            self._send(
                404, "application/json", _json({"reason": "NO_SUCH_PATH", "path": self.path})
            )
        elif not self._from_this_host():
            self._send(403, "application/json", _json({"reason": "NOT_FROM_THIS_HOST"}))
        else:
            if source.snapshot().state.phase not in {Phase.DRAINING, Phase.STOPPING, Phase.STOPPED}:
                self._server().ask_drain()
            self._send(202, "application/json", _json({"reason": "DRAINING"}))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002, ARG002
        return  # probes come every few seconds; they are no events

    def _source(self) -> AdminSource | None:
        return self._server().source

    def _server(self) -> _Server:
        return cast("_Server", self.server)

    def _from_this_host(self) -> bool:
        """A loopback peer that is no web page: browsers name the page in `Origin`."""
        peer = ipaddress.ip_address(self.client_address[0])
        return peer.is_loopback and self.headers.get("Origin") is None

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _cut(connection: _Request) -> None:
    """End a connection under the thread that reads or writes it, which then closes it."""
    if isinstance(connection, socket.socket):
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _json(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _probe(verdict: Verdict) -> tuple[int, str, bytes]:
    body = {
        "status": "ok" if verdict.ok else "fail",
        "reason": verdict.reason,
        "detail": verdict.detail,
    }
    return (_OK if verdict.ok else _UNAVAILABLE), "application/json", _json(body)


def _plan(source: AdminSource) -> tuple[int, str, bytes]:
    return _OK, "application/json", source.snapshot().settings.plan.to_json().encode()


def _metrics(source: AdminSource) -> tuple[int, str, bytes]:
    exposition = Exposition(source.snapshot, source.board, source.beat_age_s)
    return _OK, METRICS_TYPE, exposition.text(time.monotonic())


_Handler.routes = {
    "/health/startup": lambda source: _probe(health.startup(source.snapshot())),
    "/health/live": lambda source: _probe(
        health.live(source.snapshot(), beat_age_s=source.beat_age_s())
    ),
    "/health/ready": lambda source: _probe(
        health.ready(source.snapshot(), beat_age_s=source.beat_age_s())
    ),
    "/status": lambda source: (
        _OK,
        "application/json",
        _json(status_body(source, time.monotonic())),
    ),
    "/plan": _plan,
    "/metrics": _metrics,
}
