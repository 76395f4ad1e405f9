"""Runs `appliance model fetch`: file by file, resumable, the directory whole or not there."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TextIO

import httpx

from appliance.checkpoint.document import load_own
from appliance.checkpoint.manifest import MANIFEST
from appliance.checkpoint.staging import LOCK_NAME, Staging, require_new
from appliance.checkpoint.writer import require_room, storage_errors, write_file, write_json
from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.fetch.download import Downloader, measure
from appliance.fetch.progress import FetchProgress
from appliance.fetch.repair import (
    REPORT_NAME,
    Condition,
    files_of,
    is_listed,
    is_of,
    load_report,
    look,
    manifest_text,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from appliance.fetch.remote import Hub, Listing, RemoteFile

_JOURNAL = ".fetch.json"
_TIMEOUT_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_OTHER_WEIGHTS = frozenset(
    {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".tflite"}
)
_OWN_NAMES = frozenset({REPORT_NAME, MANIFEST})


@dataclass(frozen=True)
class Job:
    """One fetch.

    Attributes:
        source: `hub` or `modelscope`.
        repository: `owner/name`.
        revision: Commit, tag or branch; the last two are resolved to a commit once.
        target: Directory to make.
    """

    source: str
    repository: str
    revision: str
    target: Path


def fetch(job: Job, hub: Hub, stream: TextIO) -> dict[str, Any]:
    """Fetch a checkpoint; return its report, fetch_report.json, `already_there` and `replaced`.

    A directory that the same fetch already made is read through; what is damaged of it is fetched
    again and replaced, and nobody is asked if nothing is and the revision is a commit. Where the
    report itself is damaged, SHA256SUMS and the hub say whether it is the same fetch. What an
    earlier run has brought of the same commit is not fetched again.

    Raises:
        ApplianceError: FETCH_OFFLINE, OUTPUT_EXISTS, OUTPUT_FOREIGN, OUTPUT_BUSY (exit 2);
            FETCH_UNREACHABLE, DISK_FULL, OUTPUT_UNWRITABLE (12); FETCH_NOT_FOUND, FETCH_DENIED,
            FETCH_EMPTY (30); FETCH_DAMAGED (31).
    """
    report = load_report(job.target)
    asked = {"source": job.source, "repository": job.repository, "revision": job.revision}
    made = report if report is not None and asked.items() <= report.items() else None
    condition = None
    if made is not None and _COMMIT.fullmatch(job.revision):
        condition = _look(job, made, stream)
        if not condition.damaged:
            replaced = _mend(job.target, made, condition.digests)
            return {**made, "replaced": replaced, "already_there": True}
    listing = hub.list(job.repository, job.revision)
    chosen = _chosen(job, listing)
    wanted = {**asked, "commit": listing.commit, "files": _described(chosen)}
    whole = {**wanted, "bytes": sum(file.size for file in chosen)}
    if made == whole or is_of(job.target, chosen):
        condition = condition if condition and made == whole else _look(job, whole, stream)
        replaced = _repair(job, chosen, condition, whole, headers=listing.headers, stream=stream)
        return {**whole, "replaced": replaced, "already_there": True}
    require_new(job.target)
    with Staging(job.target, source=job.target / "none") as staging:
        _reopen(staging, wanted)
        digests = _bring(staging.path, chosen, listing.headers, stream)
        write_json(staging.path / REPORT_NAME, whole)
        _write_manifest(staging.path, digests)
        with storage_errors(staging.path):
            (staging.path / _JOURNAL).unlink()
        staging.commit()
    return {**whole, "replaced": [], "already_there": False}


def _reopen(staging: Staging, wanted: dict[str, Any]) -> None:
    """Keep what an earlier run has brought of the same files, else begin with nothing."""
    if load_own(staging.path / _JOURNAL) != wanted:
        staging.clear()
        write_json(staging.path / _JOURNAL, wanted)


def _look(job: Job, report: Mapping[str, Any], stream: TextIO) -> Condition:
    """Read a finished directory through, and name what is damaged of it."""
    files = files_of(report)
    stream.write(f"INFO fetch.check files={len(files)} bytes={report['bytes']}\n")
    stream.flush()
    condition = look(job.target, files)
    stream.writelines(
        f"WARNING fetch.damaged name={name} found={wrong!r}\n"
        for name, wrong in condition.damaged.items()
    )
    if not condition.damaged:
        _sweep(job, report)
    return condition


def _sweep(job: Job, report: Mapping[str, Any]) -> None:
    """Remove the `DST.part` of a repair that was killed when all was in its place."""
    staging = Staging(job.target, source=job.target / "none", is_repair=True)
    if not (staging.path / LOCK_NAME).exists():
        return
    journal = load_own(staging.path / _JOURNAL)
    is_empty = {path.name for path in staging.path.iterdir()} == {LOCK_NAME}
    if is_empty or (journal is not None and journal.items() <= report.items()):
        with staging:
            staging.remove()


def _repair(
    job: Job,
    files: Sequence[RemoteFile],
    condition: Condition,
    whole: dict[str, Any],
    *,
    headers: Mapping[str, str],
    stream: TextIO,
) -> list[str]:
    """Fetch what is damaged, put it in its place, and return the names of what was replaced."""
    damaged = [file for file in files if file.name in condition.damaged]
    digests = dict(condition.digests)
    if damaged:
        with Staging(job.target, source=job.target / "none", is_repair=True) as staging:
            _reopen(staging, {key: value for key, value in whole.items() if key != "bytes"})
            digests |= _bring(staging.path, damaged, headers, stream)
            staging.replace([file.name for file in damaged])
    for file in damaged:
        digests[file.name] = digests[file.name] or measure(file, job.target / file.name)[0]
    return [*(file.name for file in damaged), *_mend(job.target, whole, digests)]


def _mend(target: Path, report: Mapping[str, Any], digests: Mapping[str, str]) -> list[str]:
    """Write report and SHA256SUMS again if they do not say what is there; return their names."""
    mended: list[str] = []
    if load_own(target / REPORT_NAME) != report:
        write_json(target / REPORT_NAME, report)
        mended.append(REPORT_NAME)
    if not is_listed(target, digests):
        write_file(target / MANIFEST, manifest_text(target, digests))
        mended.append(MANIFEST)
    return mended


def _chosen(job: Job, listing: Listing) -> tuple[RemoteFile, ...]:
    """Pick what a server of safetensors reads: files at the top, without other weights.

    Names are the hub's: what could lead out of the directory is not picked.
    """
    found = tuple(
        file
        for file in sorted(listing.files, key=lambda each: each.name)
        if _NAME.fullmatch(file.name)
        and PurePosixPath(file.name).suffix not in (_OTHER_WEIGHTS | {".part"})
        and file.name not in _OWN_NAMES
    )
    if not any(file.name.endswith(".safetensors") for file in found):
        fault = Fault(
            "FETCH_EMPTY",
            f"{job.source} {job.repository}@{job.revision}",
            "a repository with safetensors at its top",
            f"{len(listing.files)} files, none of them",
            "choose another repository or revision",
        )
        raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)
    return found


def _described(files: Sequence[RemoteFile]) -> dict[str, Any]:
    return {
        file.name: {"bytes": file.size, "sha256": file.sha256, "git_sha1": file.git_sha1}
        for file in files
    }


def _bring(
    directory: Path, files: Sequence[RemoteFile], headers: Mapping[str, str], stream: TextIO
) -> dict[str, str]:
    """Fetch every file that is not there; return name to SHA-256 where it is known."""
    require_room(directory, sum(_missing(directory, file) for file in files))
    progress = FetchProgress(stream, total=sum(file.size for file in files), files=len(files))
    digests: dict[str, str] = {}
    try:
        with httpx.Client(
            headers=dict(headers), timeout=_TIMEOUT_S, follow_redirects=True
        ) as client:
            downloader = Downloader(client, advance=progress.advance)
            for file in files:
                path = directory / file.name
                if path.exists():  # it got its name after its digest was right
                    progress.advance(file.size)
                    progress.file(file.name, file.size, resumed=file.size)
                    digests[file.name] = file.sha256
                    continue
                done = downloader.fetch(file, path)
                digests[file.name] = done.sha256
                progress.file(file.name, file.size, resumed=done.resumed)
    finally:
        progress.close()
    return digests


def _missing(directory: Path, file: RemoteFile) -> int:
    """Bytes of a file that are still to come."""
    for name in (file.name, f"{file.name}.part"):
        path = directory / name
        if path.exists():
            return max(0, file.size - path.stat().st_size)
    return file.size


def _write_manifest(directory: Path, digests: Mapping[str, str]) -> None:
    """Write SHA256SUMS over everything, so that `model.integrity: sha256` can be asked for."""
    known = dict(digests)
    for name, digest in digests.items():
        if not digest:
            with (directory / name).open("rb") as file:
                known[name] = hashlib.file_digest(file, "sha256").hexdigest()
    write_file(directory / MANIFEST, manifest_text(directory, known))
