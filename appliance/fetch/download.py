"""Fetches one file: goes on where an earlier run was cut, and believes nothing but the digest."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from appliance.checkpoint.writer import storage_errors, sync_directory
from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.fetch.remote import denied, unreachable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.fetch.remote import RemoteFile

_CHUNK = 1 << 20
_ATTEMPTS = 6
"""Tries in a row that bring not one byte before the hub counts as gone."""

_LONGEST_WAIT_S = 8.0
_PARTIAL, _OK, _RANGE_REFUSED = 206, 200, 416
_DENIED = frozenset({401, 403})
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Fetched:
    """A file that is there.

    Attributes:
        sha256: Of its content.
        resumed: Bytes that an earlier run had brought.
    """

    sha256: str
    resumed: int


class Downloader:
    """Fetches files over one client."""

    def __init__(
        self,
        client: httpx.Client,
        *,
        advance: Callable[[int], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Keep the client, whom to tell of bytes (negative: lost again), and how to wait."""
        self._client = client
        self._advance = advance
        self._sleep = sleep

    def fetch(self, file: RemoteFile, path: Path) -> Fetched:
        """Bring a file; `PATH.part` grows and becomes `PATH` when size and digest are right.

        Content with a wrong digest is thrown away and fetched once more.

        Raises:
            ApplianceError: FETCH_UNREACHABLE or DISK_FULL (exit 12; what is there is kept),
                FETCH_DENIED (30), FETCH_DAMAGED (31).
        """
        part = path.with_name(f"{path.name}.part")
        resumed = part.stat().st_size if part.exists() else 0
        for last in (False, True):
            self._fill(file, part)
            sha256, value = measure(file, part)
            if not value:
                with storage_errors(path):
                    part.rename(path)
                    sync_directory(path.parent)
                return Fetched(sha256, resumed)
            self._advance(-part.stat().st_size)
            part.unlink()
            if last:
                raise _damaged(file, value)
        raise AssertionError  # pragma: no cover - the loop returns or raises

    def _fill(self, file: RemoteFile, part: Path) -> None:
        """Append to the partial file until it has the size that the hub states."""
        with storage_errors(part), part.open("ab") as output:
            have = output.tell()
            if have > file.size:
                output.truncate(0)
                have = 0
            self._advance(have)
        misses = restarts = 0
        while have < file.size:
            before = have
            have, reason = self._stream(file, part, have)
            restarts += have == 0 < before
            if restarts > 1:  # nothing behind this byte: the file is shorter than stated
                raise _damaged(file, f"{before} of {file.size} bytes")
            misses = 0 if have > before else misses + 1
            if misses >= _ATTEMPTS:
                raise unreachable(file.name, reason)
            if misses:
                self._sleep(min(0.5 * 2.0**misses, _LONGEST_WAIT_S))

    def _stream(self, file: RemoteFile, part: Path, have: int) -> tuple[int, str]:
        """Make one request; return the size afterwards and why it ended."""
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        try:
            with self._client.stream("GET", file.url, headers=headers) as answer:
                status = answer.status_code
                if status in _DENIED:
                    raise denied(file.name, f"HTTP {status}")
                begin = _begin_of(answer, have)
                if begin is None:
                    if status in _RETRIED or status == _RANGE_REFUSED:
                        return self._restart(part, have, status)
                    raise unreachable(file.name, f"HTTP {status}")
                return self._append(answer, file, part, have=have, begin=begin)
        except httpx.HTTPError as error:
            return (part.stat().st_size, f"{type(error).__name__} {error}".strip())

    def _restart(self, part: Path, have: int, status: int) -> tuple[int, str]:
        """Begin at zero if the hub refuses to go on; else just try again."""
        if status == _RANGE_REFUSED:
            with storage_errors(part):
                os.truncate(part, 0)
            self._advance(-have)
            return 0, "HTTP 416"
        return have, f"HTTP {status}"

    def _append(
        self, answer: httpx.Response, file: RemoteFile, part: Path, *, have: int, begin: int
    ) -> tuple[int, str]:
        """Write the body behind byte `begin`, never more than the file has."""
        with storage_errors(part), part.open("r+b") as output:
            output.truncate(begin)
            output.seek(begin)
            self._advance(begin - have)
            # A cut connection ends the loop by an exception: what came before it is kept.
            with contextlib.ExitStack() as at_end:
                at_end.callback(os.fsync, output.fileno())
                at_end.callback(output.flush)
                for chunk in answer.iter_raw():  # no size: it would hold back what a cut loses
                    left = file.size - output.tell()
                    if len(chunk) > left:
                        raise _damaged(file, f"more than {file.size} bytes")
                    output.write(chunk)
                    self._advance(len(chunk))
            return output.tell(), "the answer ended early"


def _begin_of(answer: httpx.Response, have: int) -> int | None:
    """Offset of the first byte of the body; None if the body is not the file's."""
    if answer.status_code == _OK:
        return 0
    if answer.status_code != _PARTIAL:
        return None
    span = answer.headers.get("Content-Range", "")
    return have if span.startswith(f"bytes {have}-") else None


def measure(file: RemoteFile, part: Path) -> tuple[str, str]:
    """Return the SHA-256 of a whole file, and what is wrong with it or nothing.

    Raises:
        OSError: If it cannot be read.
    """
    sha256 = hashlib.sha256()
    sha1 = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    with part.open("rb") as content:
        while chunk := content.read(_CHUNK):
            sha256.update(chunk)
            if file.git_sha1:
                sha1.update(chunk)
    if file.sha256 and sha256.hexdigest() != file.sha256.lower():
        return "", f"SHA-256 {sha256.hexdigest()[:12]} instead of {file.sha256[:12]}"
    if file.git_sha1 and sha1.hexdigest() != file.git_sha1.lower():
        return "", f"git digest {sha1.hexdigest()[:12]} instead of {file.git_sha1[:12]}"
    return sha256.hexdigest(), ""


def _damaged(file: RemoteFile, value: str) -> ApplianceError:
    what = "size and digest that the hub states"
    fix = "run it again later; if it stays so, the hub's copy is damaged"
    fault = Fault("FETCH_DAMAGED", file.name, what, value, fix)
    return ApplianceError(ExitCode.CHECKPOINT_CORRUPT, fault)
