"""The watch over an engine whose API server answers while nothing behind it does."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from appliance.serve.client import EngineClient
from appliance.serve.progress import Health, WatchStatus
from appliance.serve.watch import Watch


class Hollow(BaseHTTPRequestHandler):
    """Metrics with the status of the server, and no answer to any question."""

    metrics_status = 200

    def do_GET(self) -> None:
        body = b"vllm:num_requests_running 0\nvllm:generation_tokens_total 5\n"
        self.send_response(self.metrics_status)
        with contextlib.suppress(OSError):  # a client that was too slow has left
            self.end_headers()
            self.wfile.write(body)

    def do_POST(self) -> None:
        self.connection.recv(1)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        pass


@pytest.fixture(params=[200, 500], ids=["metrics", "metrics fail"])
def client(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    """Return a client of such an engine."""
    handler = type("_Hollow", (Hollow,), {"metrics_status": request.param})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield EngineClient("127.0.0.1", server.server_address[1], "token")
    server.shutdown()
    server.server_close()


def test_rc_040_idle_engine_that_answers_nothing_stalls_whatever_its_metrics_say(
    client: EngineClient,
) -> None:
    told: queue.SimpleQueue[WatchStatus] = queue.SimpleQueue()
    watch = Watch(client, "m", stall_s=1.0, in_flight=lambda: 0, on_verdict=told.put)
    watch.start()

    verdict = told.get(timeout=10)

    watch.stop()
    assert verdict.health is Health.STALLED
    assert verdict.waited_s >= 1.0
