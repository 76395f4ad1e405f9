"""The gateway in front of vLLM's routes: keys, limits, draining. A pure ASGI class, no proxy hop.

vLLM builds it from `--middleware appliance.serve.middleware.Gateway`. Its orders come from the
supervisor (`appliance.serve.handoff`); without them it refuses to be built, and the API with it.
`/health` passes untouched. Requests that carry the run's token are the supervisor's own: they pass
while traffic is closed, and no limit counts them. Standard library only.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.serve.board import Board, Slot, Traffic
from appliance.serve.handoff import TOKEN_HEADER, VARIABLE, Handoff
from appliance.serve.keys import KeyFile, RateLimit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health"})
CLOSED_PATHS = frozenset(
    {
        *("/scale_elastic_ep", "/is_scaling_elastic_ep", "/collective_rpc", "/server_info"),
        *("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused"),
        *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/abort_requests"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/start_profile", "/stop_profile"),
        *("/init_weight_transfer_engine", "/update_weights", "/get_world_size"),
    }
)
"""Routes of vLLM that manage the engine: nobody's on the port of the API, whichever it has."""

BODY_IDLE_S = 30.0
"""A body that stops coming for this long is given up."""

BODY_PACE = 16 * 1024
"""Bytes a second that a body must come with on the whole, or a trickle would hold its place."""

LINGER_S = 2.0
LINGER_BYTES = 16 * 1024**2
"""How long and how much of a refused body is read, so that its sender sees the answer, no reset."""

RETRY_AFTER_S = 5
_UNAUTHORIZED = 401


@dataclass(frozen=True)
class Refusal:
    """An answer of the gateway itself, in the shape of OpenAI's errors."""

    status: int
    code: str
    message: str
    slot: Slot
    retry_after_s: int | None = None
    close: bool = False


class _DisconnectedError(Exception):
    pass


class Gateway:
    """Lets a request through to vLLM or answers it."""

    def __init__(
        self,
        app: App,
        *,
        clock: Callable[[], float] = time.monotonic,
        body_idle_s: float = BODY_IDLE_S,
        body_pace: float = BODY_PACE,
    ) -> None:
        """Take the orders of the supervisor.

        Raises:
            RuntimeError: If there are none: the API must not run without its gateway.
            OSError: If the board or the key file cannot be read.
        """
        path = os.environ.get(VARIABLE)
        if path is None:
            raise RuntimeError(f"{VARIABLE} is not set: this API is started by `appliance serve`")
        self._orders = Handoff.read(Path(path))
        self._app = app
        self._body_idle_s = body_idle_s
        self._body_pace = body_pace
        self._clock = clock
        self._admitted = 0
        self._board = Board.attach(Path(self._orders.board))
        self._board.zero(Slot.IN_FLIGHT)
        keys = self._orders.api_keys_file
        self._keys = KeyFile(Path(keys), clock) if keys is not None else None
        self._rate = RateLimit(self._orders.requests_per_minute_per_key, clock)
        self._token = self._orders.token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event of ASGI."""
        if scope["type"] not in {"http", "websocket"} or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if hmac.compare_digest(headers.get(TOKEN_HEADER.encode(), b""), self._token):
            await self._app(scope, receive, send)
            return
        # Counted before traffic is looked at: the supervisor sets the state and then reads the
        # count, so that one of the two sees the other.
        self._board.add(Slot.IN_FLIGHT)
        try:
            await self._guarded(scope, headers, receive, send)
        except _DisconnectedError:
            return
        finally:
            self._board.add(Slot.IN_FLIGHT, -1)

    async def _guarded(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        refusal = self._judge(scope, headers)
        if refusal is None:
            # Its own count: those that are being refused must not take the places of others.
            self._admitted += 1
            try:
                await self._admit(scope, receive, send)
            finally:
                self._admitted -= 1
            return
        self._board.add(refusal.slot)
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": refusal.code})
            return
        await self._linger(headers, receive)
        await _answer(refusal, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            self._board.add(Slot.ACCEPTED)
            await self._app(scope, receive, send)
            return
        outcome = await self._read_body(receive)
        if isinstance(outcome, Refusal):
            self._board.add(outcome.slot)
            await _answer(outcome, send)
            return
        self._board.add(Slot.ACCEPTED)
        await self._app(scope, _replay(outcome, receive), self._closing(send))

    def _judge(self, scope: Scope, headers: dict[bytes, bytes]) -> Refusal | None:
        """Decide by what is known before the body."""
        traffic = self._board.traffic
        if traffic is not Traffic.OPEN:
            return _turned_away(traffic)
        preflight = scope["type"] == "http" and scope["method"] == "OPTIONS"
        key = _bearer(headers)
        if self._keys is not None and not preflight and not self._keys.admits(key):
            return Refusal(401, "invalid_api_key", "a valid API key is needed", Slot.UNAUTHORIZED)
        if scope["path"].rstrip("/") in CLOSED_PATHS:
            return Refusal(404, "not_found", "this server has no such route", Slot.CLOSED_ROUTE)
        return self._judge_load(headers, key)

    def _judge_load(self, headers: dict[bytes, bytes], key: bytes) -> Refusal | None:
        """Hold the size of a request and the number of them to their limits."""
        if _content_length(headers) > self._orders.max_request_bytes:
            return self._too_large()
        if self._admitted >= self._orders.max_concurrent_requests:
            return Refusal(
                429,
                "too_many_requests",
                "too many requests in flight",
                Slot.TOO_MANY,
                RETRY_AFTER_S,
            )
        # Without keys a made-up one must not have a rate of its own.
        wait_s = self._rate.wait_s(b"" if self._keys is None else key)
        if wait_s > 0:
            after = math.ceil(wait_s)
            return Refusal(
                429,
                "rate_limit_exceeded",
                f"over the rate of this key; try in {after} s",
                Slot.TOO_MANY,
                after,
            )
        return None

    def _too_large(self) -> Refusal:
        message = f"a request body holds at most {self._orders.max_request_bytes} bytes"
        return Refusal(413, "request_too_large", message, Slot.TOO_LARGE, close=True)

    async def _read_body(self, receive: Receive) -> bytes | Refusal:
        """Read the whole body: the engine sees complete requests only."""
        chunks: list[bytes] = []
        size = 0
        until = self._clock() + self._body_idle_s
        while True:
            left_s = until + size / self._body_pace - self._clock()
            try:
                message = await asyncio.wait_for(receive(), min(self._body_idle_s, left_s))
            except TimeoutError:
                return Refusal(
                    408, "request_timeout", "the body stopped coming", Slot.TOO_SLOW, close=True
                )
            if message["type"] == "http.disconnect":
                raise _DisconnectedError
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > self._orders.max_request_bytes:
                await self._linger({}, receive)
                return self._too_large()
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def _linger(self, headers: dict[bytes, bytes], receive: Receive) -> None:
        """Read and drop the rest of a body that is refused, within bounds."""
        if b"expect" in headers:
            return  # the sender waits for a go-ahead that it does not get
        budget = LINGER_BYTES
        try:
            async with asyncio.timeout(LINGER_S):
                while budget > 0:
                    message = await receive()
                    budget -= len(message.get("body", b""))
                    if message["type"] == "http.disconnect":
                        raise _DisconnectedError
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            return

    def _closing(self, send: Send) -> Send:
        """Close connections with their answer once draining has begun."""

        async def wrapped(message: Message) -> None:
            draining = self._board.traffic is Traffic.DRAINING
            if draining and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        return wrapped


def _turned_away(traffic: Traffic) -> Refusal:
    if traffic is Traffic.DRAINING:
        message = "this server is draining and takes no new requests"
        return Refusal(503, "draining", message, Slot.TURNED_AWAY, RETRY_AFTER_S, close=True)
    return Refusal(
        503, "not_ready", "the model is not ready yet", Slot.TURNED_AWAY, RETRY_AFTER_S, close=True
    )


def _bearer(headers: dict[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _content_length(headers: dict[bytes, bytes]) -> int:
    text = headers.get(b"content-length", b"0")
    return int(text) if text.isdigit() else 0


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the body that was read, then what comes after it: the client's disconnect."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def wrapped() -> Message:
        return pending.pop() if pending else await receive()

    return wrapped


async def _answer(refusal: Refusal, send: Send) -> None:
    error = {
        "message": refusal.message,
        "type": "appliance_error",
        "param": None,
        "code": refusal.code,
    }
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % refusal.retry_after_s))
    if refusal.status == _UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
