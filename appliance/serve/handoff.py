"""What the supervisor hands to the gateway inside the engine: a private file, named by a variable.

`APPLIANCE_HANDOFF` is set by the supervisor for its own child and read by nothing else; it is no
setting of the appliance. Standard library only, because the gateway imports it inside vLLM.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE = "APPLIANCE_HANDOFF"

TOKEN_HEADER = "x-appliance-token"  # noqa: S105 - the header's name


@dataclass(frozen=True)
class Handoff:
    """The gateway's orders.

    Attributes:
        board: Path of the shared page.
        token: Secret of this run; a request that carries it is the supervisor's own.
        api_keys_file: File with one API key a line, None when the API takes no keys.
        max_request_bytes: Largest request body.
        max_concurrent_requests: Requests in flight; one more is answered 429.
        requests_per_minute_per_key: Requests a minute of one key, 0 without a limit.
    """

    board: str
    token: str
    api_keys_file: str | None
    max_request_bytes: int
    max_concurrent_requests: int
    requests_per_minute_per_key: int

    def write(self, path: Path) -> None:
        """Write the file so that only its owner can read it."""
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file)

    @classmethod
    def read(cls, path: Path) -> Handoff:
        """Read the file.

        Raises:
            OSError: If it cannot be opened.
            ValueError: If it is no handoff.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except TypeError as error:
            raise ValueError(f"{path} is not a handoff: {error}") from error
