"""A hub on a port of this machine: lists a repository, serves its files, fails as it is told."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from fetching import COMMIT, LARGE, REPOSITORY, SMALL

from appliance.fetch import download


@dataclass
class LocalHub:
    """What the server has and does; change it before or between requests.

    `cut` maps a file to how many bytes of each answer it gets before the connection ends.
    """

    files: dict[str, bytes]
    commit: str = COMMIT
    cut: dict[str, int] = field(default_factory=dict)
    status: dict[str, list[int]] = field(default_factory=dict)
    stated: dict[str, dict[str, Any]] = field(default_factory=dict)
    ranges: bool = True
    pause: threading.Event | None = None
    requests: list[tuple[str, str]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    url: str = ""

    def siblings(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for name, content in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(content)}
            if name.endswith(".safetensors"):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
                entry["blobId"] = "0" * 40
            else:
                blob = f"blob {len(content)}\0".encode() + content
                entry["blobId"] = hashlib.sha1(blob, usedforsecurity=False).hexdigest()
            found.append(entry | self.stated.get(name, {}))
        return found


class Handler(BaseHTTPRequestHandler):
    """`/api/models/R/revision/V` and `/R/resolve/V/FILE`."""

    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, *_: object) -> None:
        """Stay silent."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((path, self.headers.get("Range", "")))
        if path.startswith(f"/api/models/{REPOSITORY}/revision/"):
            revision = path.rpartition("/")[2]
            known = revision in {"main", self.hub.commit}
            answer = {"id": REPOSITORY, "sha": self.hub.commit, "siblings": self.hub.siblings()}
            self.answer(200, json.dumps(answer).encode()) if known else self.refuse()
        elif path.startswith(f"/{REPOSITORY}/resolve/{self.hub.commit}/"):
            self.file(path.rpartition("/")[2])
        else:
            self.refuse()

    def refuse(self) -> None:
        code = "RevisionNotFound" if REPOSITORY in self.path else "RepoNotFound"
        self.answer(404, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def file(self, name: str) -> None:
        hub, content = self.hub, self.hub.files[name]
        statuses = hub.status.get(name)
        if statuses:
            self.answer(statuses.pop(0), b"")
            return
        begin = 0
        asked = self.headers.get("Range", "")
        if asked and hub.ranges:
            begin = int(asked.removeprefix("bytes=").rstrip("-"))
        if begin and begin >= len(content):
            self.answer(416, b"")
            return
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(content) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        body = content[begin:]
        if name in hub.cut:
            body = body[: hub.cut[name]]
            self.close_connection = True
        self.send(name, body)

    def send(self, name: str, body: bytes) -> None:
        """Write slowly enough to be cut: in pieces, waiting before the second if told to."""
        piece = 1 << 16
        for begin in range(0, len(body), piece):
            if begin and self.hub.pause is not None:
                self.hub.pause.wait(20)
            self.wfile.write(body[begin : begin + piece])
            self.wfile.flush()
            self.hub.sent[name] = self.hub.sent.get(name, 0) + len(body[begin : begin + piece])


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    init = download.Downloader.__init__
    monkeypatch.setattr(
        download.Downloader,
        "__init__",
        lambda self, client, **words: init(self, client, sleep=lambda _: None, **words),
    )


@pytest.fixture
def local_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub with one model of two shards; the client of this process asks it."""
    rng = np.random.default_rng(1)
    hub = LocalHub(
        {
            "config.json": b'{"model_type": "llama"}',
            LARGE: rng.bytes(1 << 20),
            SMALL: rng.bytes(300_000),
            "tokenizer.json": b"{}" * 500,
            "pytorch_model.bin": b"other weights",
            "sub/extra.json": b"{}",
            "../../escape.json": b"{}",
        }
    )
    handler = type("Handler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # clients that hang up are what this is about
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    yield hub
    if hub.pause is not None:
        hub.pause.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def wanted(local_hub: LocalHub) -> Callable[[Path], None]:
    """Assert that a directory holds what the hub has, whole."""

    def check(target: Path) -> None:
        for name in ("config.json", LARGE, SMALL, "tokenizer.json"):
            assert (target / name).read_bytes() == local_hub.files[name], name
        assert {path.name for path in target.iterdir()} == {
            *(name for name in local_hub.files if "/" not in name and not name.endswith(".bin")),
            "fetch_report.json",
            "SHA256SUMS",
        }
        assert not target.with_name(f"{target.name}.part").exists()

    return check
