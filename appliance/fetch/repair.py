"""Looks at a finished fetch byte by byte, and tells which of its files are damaged."""

from __future__ import annotations

import hashlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.checkpoint.document import as_object, load_own
from appliance.checkpoint.manifest import THREADS, read_manifest
from appliance.errors import ApplianceError
from appliance.fetch.download import measure
from appliance.fetch.remote import RemoteFile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


REPORT_NAME = "fetch_report.json"
_DIGESTS = ("sha256", "git_sha1")


@dataclass(frozen=True)
class Condition:
    """What was found of a finished fetch.

    Attributes:
        digests: SHA-256 of each file that is right.
        damaged: Name to what is wrong with it, in the order of the names.
    """

    digests: Mapping[str, str]
    damaged: Mapping[str, str]


def load_report(target: Path) -> dict[str, Any] | None:
    """Return the report of a finished fetch, None if it is gone, damaged, or not the whole one."""
    report = load_own(target / REPORT_NAME)
    if report is None or not _is_well_formed(report):
        return None
    listed = _listed(target)
    is_whole = listed.keys() - {REPORT_NAME} <= report["files"].keys()
    return report if is_whole or _is_as_listed(target, listed) else None


def _is_well_formed(report: Mapping[str, Any]) -> bool:
    files = as_object(report.get("files")) or {}
    tables = [as_object(table) or {} for table in files.values()]
    return (
        bool(tables)
        and isinstance(report.get("bytes"), int)
        and isinstance(report.get("commit"), str)
        and all(isinstance(table.get("bytes"), int) for table in tables)
        and all(isinstance(table.get(key), str) for table in tables for key in _DIGESTS)
    )


def is_of(target: Path, files: Sequence[RemoteFile]) -> bool:
    """Tell whether a directory whose report is lost or damaged was made of the files of a hub.

    Its SHA256SUMS says so: of large files the hub states the digest that is listed. Without
    any such file nobody can tell.
    """
    listed = _listed(target)
    stated = {file.name: file.sha256.lower() for file in files if file.sha256}
    return (
        bool(stated)
        and REPORT_NAME in listed
        and not _is_as_listed(target, listed)
        and all(file.name in listed for file in files)
        and all(listed[name] == digest for name, digest in stated.items())
    )


def _listed(target: Path) -> Mapping[str, str]:
    """Return what SHA256SUMS lists, nothing if it cannot be read."""
    try:
        return read_manifest(target)
    except ApplianceError:
        return {}


def _is_as_listed(target: Path, listed: Mapping[str, str]) -> bool:
    try:
        return listed.get(REPORT_NAME) == _digest(target)
    except OSError:
        return False


def _digest(target: Path) -> str:
    return hashlib.sha256((target / REPORT_NAME).read_bytes()).hexdigest()


def files_of(report: Mapping[str, Any]) -> tuple[RemoteFile, ...]:
    """Return the files that a report lists; where they were is not in it."""
    files = as_object(report.get("files")) or {}
    tables = {name: as_object(each) or {} for name, each in files.items()}
    return tuple(
        RemoteFile(name, table["bytes"], "", table["sha256"], table["git_sha1"])
        for name, table in sorted(tables.items())
    )


def look(target: Path, files: Sequence[RemoteFile]) -> Condition:
    """Read every file of a finished fetch and compare size and digest with the report's."""
    with ThreadPoolExecutor(max_workers=THREADS) as pool:  # hashing releases the interpreter
        found = list(pool.map(_look, itertools.repeat(target), files))
    pairs = list(zip(files, found, strict=True))
    return Condition(
        {file.name: digest for file, (digest, wrong) in pairs if not wrong},
        {file.name: wrong for file, (_, wrong) in pairs if wrong},
    )


def _look(target: Path, file: RemoteFile) -> tuple[str, str]:
    path = target / file.name
    try:
        size = path.stat().st_size
        if size != file.size:
            return "", f"{size} bytes instead of {file.size}"
        return measure(file, path)
    except OSError as error:
        return "", error.strerror or type(error).__name__


def is_listed(target: Path, digests: Mapping[str, str]) -> bool:
    """Tell whether SHA256SUMS names every file of a finished fetch, its report too, as they are."""
    known = {**digests, REPORT_NAME: _digest(target)}
    return known.items() <= _listed(target).items()


def manifest_text(target: Path, digests: Mapping[str, str]) -> bytes:
    """Return SHA256SUMS of files whose digests are known and of the report beside them."""
    known = {**digests, REPORT_NAME: _digest(target)}
    return "".join(f"{known[name]}  {name}\n" for name in sorted(known)).encode()
