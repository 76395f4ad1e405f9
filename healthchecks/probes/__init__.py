"""Probes for orchestrators: standard library only, exit 0 or 1, one reason line on stdout.

`python -I -S .../probes/ready.py [--url URL | --host H --port N | --state-dir DIR] [--timeout S]`.

Where to ask, in this order: what the arguments say; the run file that a running appliance keeps in
its state directory; 127.0.0.1:9400. No environment variable is read, and the appliance answers from
what it knows already, so a probe never waits for the engine or a GPU.
"""

from __future__ import annotations

import json
import socket
import sys
import time

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9400
DEFAULT_STATE_DIR = "/var/lib/appliance"
DEFAULT_TIMEOUT_S = 5.0
LARGEST_ANSWER = 65536

_USAGE = "usage: [--url URL] [--host HOST] [--port N] [--state-dir DIR] [--timeout SECONDS]"


class ProbeUsageError(Exception):
    """The arguments are not those of a probe."""


def main(kind: str, arguments: list[str] | None = None) -> int:
    """Ask for one kind (`startup`, `live`, `ready`), print the reason, return 0 or 1.

    An orchestrator knows no third code, so wrong arguments are a failed probe as well.
    """
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        timeout_s = float(options.get("timeout", str(DEFAULT_TIMEOUT_S)))
        host, port = address(options)
    except (ProbeUsageError, ValueError) as error:
        sys.stdout.write(f"USAGE {error}; {_USAGE}\n")
        return 1
    return probe(kind, host, port, timeout_s)


def probe(kind: str, host: str, port: int, timeout_s: float) -> int:
    """Ask the admin port, print one line, and return 0 for 200 and 1 for everything else."""
    try:
        status, body = ask(f"/health/{kind}", host, port, timeout_s)
    except OSError as error:
        text = "timed out" if isinstance(error, TimeoutError) else error.strerror or str(error)
        sys.stdout.write(f"UNREACHABLE {host}:{port}: {text}\n")
        return 1
    sys.stdout.write(reason(status, body) + "\n")
    return 0 if status == 200 else 1  # noqa: PLR2004 - HTTP's own number


def parse(arguments: list[str]) -> dict[str, str]:
    """Return the options given as `--name value` or `--name=value`.

    Raises:
        ProbeUsageError: If one is unknown or has no value.
    """
    known = {"url", "host", "port", "state-dir", "timeout"}
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).removeprefix("--").partition("=")
        if name not in known:
            raise ProbeUsageError(f"unknown argument {name}")
        if not equals:
            if not rest:
                raise ProbeUsageError(f"--{name} needs a value")
            value = rest.pop(0)
        options[name] = value
    return options


def address(options: dict[str, str]) -> tuple[str, int]:
    """Return host and port of the admin port.

    Raises:
        ValueError: If the URL or the port is none.
    """
    if "url" in options:
        place = options["url"].removeprefix("http://").split("/", 1)[0]
        host, _, port = place.rpartition(":")
        return host.strip("[]"), int(port)
    if "port" in options or "host" in options:
        return options.get("host", DEFAULT_HOST), int(options.get("port", str(DEFAULT_PORT)))
    return _from_run_file(options.get("state-dir", DEFAULT_STATE_DIR))


def _from_run_file(state_dir: str) -> tuple[str, int]:
    try:
        with open(f"{state_dir}/run/admin.json", encoding="utf-8") as file:  # noqa: PTH123 - speed
            place = json.load(file)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(place["host"], place["host"])  # noqa: S104
        return str(host), int(place["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return DEFAULT_HOST, DEFAULT_PORT


def ask(path: str, host: str, port: int, timeout_s: float) -> tuple[int, bytes]:
    """GET a path over HTTP/1.0 and return status and body, all within `timeout_s`.

    Raises:
        OSError: If nobody answers there, or not in time; TimeoutError for the latter.
    """
    deadline = time.monotonic() + timeout_s
    chunks: list[bytes] = []
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        request = f"GET {path} HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode())
        while sum(map(len, chunks)) < LARGEST_ANSWER:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            connection.settimeout(left_s)
            chunk = connection.recv(LARGEST_ANSWER)
            if not chunk:
                break
            chunks.append(chunk)
    head, _, body = b"".join(chunks).partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():  # noqa: PLR2004
        raise ConnectionError("the answer is no HTTP")
    return int(words[1]), body


def reason(status: int, body: bytes) -> str:
    """Return the one line of an answer: its reason code, and what more it says."""
    try:
        answer = json.loads(body)
        line = f"{answer['reason']} {answer.get('detail', '')}"
    except (ValueError, KeyError, TypeError, AttributeError):
        line = f"HTTP {status}"
    return " ".join(line.split())
