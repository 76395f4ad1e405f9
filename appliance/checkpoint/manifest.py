"""Compares a checkpoint with its `SHA256SUMS`, as `sha256sum` writes it; standard library only.

The manifest must name every file that the engine may read, so that none can be put beside it.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from appliance.checkpoint.faults import FaultList, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MANIFEST = "SHA256SUMS"
THREADS = 4
LARGEST_MANIFEST = 1024**2
READ_BY_THE_ENGINE = frozenset({".safetensors", ".json", ".jinja", ".model", ".py", ".txt"})
"""Endings of files whose content decides what is served."""

_LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64}) [ *](?P<name>.+)")
_WRITE = f"where the checkpoint is known to be good: `sha256sum -- *.* > {MANIFEST}`"


def verify_manifest(root: Path) -> int:
    """Compare every file that the manifest names; return how many bytes were read.

    Args:
        root: Directory of the checkpoint.

    Raises:
        ApplianceError: Exit 30 if the manifest is missing, malformed or leaves a file out, 31 if a
            file has another digest.
    """
    digests = read_manifest(root)
    faults = FaultList()
    for path in sorted(root.iterdir()):
        if path.suffix in READ_BY_THE_ENGINE and path.name not in digests:
            fix = f"remove the file, or list it {_WRITE}"
            faults.add("E_MANIFEST", str(path), f"must be named by {MANIFEST}", "no line", fix)
    names, count = list(digests), len(digests)
    with ThreadPoolExecutor(max_workers=THREADS) as pool:  # hashing releases the interpreter
        places, lists = itertools.repeat(root, count), itertools.repeat(faults, count)
        size = sum(pool.map(_compare, places, names, digests.values(), lists))
    faults.faults.sort(key=lambda fault: fault.where)
    faults.raise_if_any(str(root))
    return size


def read_manifest(root: Path) -> Mapping[str, str]:
    """Return the digest of each file that the manifest names, without the manifest itself.

    Raises:
        ApplianceError: Exit 30 if it is missing, malformed, or names a file outside the directory.
    """
    path = root / MANIFEST
    what = "must list the SHA-256 of every file of the checkpoint (model.integrity: sha256)"
    fix = f"write it {_WRITE}"
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_MANIFEST + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        value = getattr(error, "strerror", None) or str(error)
        raise refuse("E_MANIFEST", str(path), what, value, fix) from error
    if len(content) > LARGEST_MANIFEST or not text.strip():
        raise refuse("E_MANIFEST", str(path), what, f"{len(content)} bytes", fix)
    digests: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        match = _LINE.fullmatch(line)
        if match is None or not _inside(match["name"]):
            line_form = "must be a digest, two spaces and a name inside the directory"
            where = f"{path}:{number}"
            raise refuse("E_MANIFEST", where, line_form, repr(line[:80]), fix)
        name = str(PurePosixPath(match["name"]))
        if digests.setdefault(name, match["digest"].lower()) != match["digest"].lower():
            raise refuse("E_MANIFEST", f"{path}:{number}", "one digest a file", repr(name), fix)
    digests.pop(MANIFEST, None)
    return digests


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return name.isprintable() and not path.is_absolute() and ".." not in path.parts


def _compare(root: Path, name: str, digest: str, faults: FaultList) -> int:
    """Compare one file; return its size."""
    path = root / name
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
    except OSError as error:
        what, fix = f"must be readable, as {MANIFEST} names it", "fetch it, or write the list again"
        faults.add("E_MANIFEST", str(path), what, error.strerror or str(error), fix)
        return 0
    if found != digest:
        what = f"must have the digest that {MANIFEST} gives, {digest[:12]}"
        faults.add("E_DIGEST", str(path), what, found[:12], "fetch the file again")
    return size
