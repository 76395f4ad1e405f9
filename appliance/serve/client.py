"""HTTP to the engine's API port, with hard time limits; blocking, for worker threads only."""

from __future__ import annotations

import http.client
import json
import math
from dataclasses import dataclass
from typing import Any, cast

from appliance.serve.handoff import TOKEN_HEADER

LARGEST_ANSWER = 16 * 1024**2


class EngineUnreachableError(Exception):
    """Nobody listens on the engine's port."""


class EngineSilentError(Exception):
    """The engine did not answer in time, or broke the connection."""


@dataclass(frozen=True)
class Answer:
    """Status and body of one answer."""

    status: int
    body: bytes

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object, empty if it is none; NaN is read as such."""
        try:
            value: object = json.loads(self.body)
        except ValueError:
            return {}
        return cast("dict[str, Any]", value) if isinstance(value, dict) else {}

    def text(self) -> str:
        """Return the body as text."""
        return self.body.decode(errors="replace")


@dataclass(frozen=True)
class EngineClient:
    """Where the engine listens and the token that lets the supervisor through its gateway."""

    host: str
    port: int
    token: str

    def get(self, path: str, *, timeout_s: float) -> Answer:
        """GET a path.

        Raises:
            EngineUnreachableError: If the port is closed.
            EngineSilentError: If no whole answer came within `timeout_s`.
        """
        return self._ask("GET", path, None, timeout_s)

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> Answer:
        """POST a JSON object.

        Raises:
            EngineUnreachableError: If the port is closed.
            EngineSilentError: If no whole answer came within `timeout_s`.
        """
        return self._ask("POST", path, json.dumps(body).encode(), timeout_s)

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=max(timeout_s, 0.05))
        headers = {TOKEN_HEADER: self.token, "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, path, body=body, headers=headers)
            response = connection.getresponse()
            return Answer(response.status, response.read(LARGEST_ANSWER))
        except ConnectionRefusedError as error:
            raise EngineUnreachableError(f"{self.host}:{self.port} refuses connections") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineSilentError(
                f"{method} {path}: {str(error) or type(error).__name__}"
            ) from error
        finally:
            connection.close()


def is_finite_number(value: object) -> bool:
    """Tell whether a JSON value is a number that is neither NaN nor infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
