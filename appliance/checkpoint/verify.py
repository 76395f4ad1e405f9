"""Checks a checkpoint as it lies on the disk: index, sizes, digests, tokenizer, chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.checkpoint.document import as_object, is_named, is_regular, read_document
from appliance.checkpoint.faults import FaultList
from appliance.checkpoint.manifest import MANIFEST, verify_manifest
from appliance.checkpoint.read import read_checkpoint, summary_of
from appliance.checkpoint.rules import Lenient
from appliance.checkpoint.shards import INDEX_NAME
from appliance.checkpoint.smoke import CPU_S, try_part
from appliance.checkpoint.tied import check_tied
from appliance.errors import ApplianceError
from appliance.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.checkpoint.read import Checkpoint
    from appliance.checkpoint.summary import CheckpointSummary

_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: `pointers`, `weights`, `digests`, `tokenizer` or `chat template`.
        result: `pass`, `warn` or `skip`.
        detail: One sentence.
    """

    name: str
    result: str
    detail: str


@dataclass(frozen=True)
class Verification:
    """A checkpoint that passed.

    Attributes:
        summary: What it is.
        checks: What was looked at, in order.
    """

    summary: CheckpointSummary
    checks: tuple[Check, ...]


def verify(
    root: Path, *, hashes: bool = True, cpu_s: int = CPU_S, lenient: Lenient = Lenient.NONE
) -> Verification:
    """Check every file of a checkpoint and gather all faults of the files before stopping.

    Args:
        root: Directory.
        hashes: Compare with SHA256SUMS where there is one; takes as long as reading every byte.
        cpu_s: Processor time that tokenizer and template may take each.
        lenient: What is done with modules that are excluded and packed all the same.

    Raises:
        ApplianceError: Exit 31 if a file is corrupt, 30 if the checkpoint is not served.
    """
    faults = FaultList()
    checks: list[Check] = []
    _gather(faults, lambda: checks.append(_pointers(root)))
    found: list[Checkpoint] = []
    _gather(faults, lambda: found.append(read_checkpoint(root, lenient)))
    if found:
        _gather(faults, lambda: checks.append(_weights(found[0])))
    if hashes:
        _gather(faults, lambda: checks.append(_digests(root)))
    else:
        checks.append(Check("digests", "skip", "not asked for"))
    vocab_size = found[0].outline.geometry.vocab_size if found else 2**31
    if is_regular(root / "config.json"):
        for part in ("tokenizer", "template"):
            _try(part, root, vocab_size, cpu_s, checks, faults)
    faults.raise_if_any(str(root))
    return Verification(summary_of(found[0]), tuple(checks))


def _gather(faults: FaultList, look: Callable[[], None]) -> None:
    try:
        look()
    except ApplianceError as error:
        for fault in error.faults:
            if fault not in faults.faults:
                faults.add(fault.code, fault.where, fault.what, fault.value, fault.fix)


def _pointers(root: Path) -> Check:
    """Look for Git LFS pointers among all files, not only the shards."""
    faults, count = FaultList(), 0
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.suffix == ".safetensors" or not is_regular(path):
            continue  # the shards' own reader tells pointers among them
        count += 1
        try:
            with path.open("rb") as file:
                start = file.read(len(_POINTER))
        except OSError as error:
            fix = "make it readable for the user that serves"
            value = error.strerror or "an error"
            faults.add("E_UNREADABLE", str(path), "a readable file", value, fix)
            continue
        if start == _POINTER:
            fix = "fetch it with `git lfs pull`"
            faults.add("E_LFS_POINTER", str(path), "the file itself", "a Git LFS pointer", fix)
    faults.raise_if_any(str(root))
    return Check("pointers", "pass", f"none among {count} files beside the weights")


def _weights(found: Checkpoint) -> Check:
    shards = found.shards
    check_tied(found.config, shards)
    stored = sum(end - begin for header in shards.headers.values() for begin, end in header.extents)
    tensors = sum(len(header.forms) for header in shards.headers.values())
    detail = f"{tensors} tensors, {format_bytes(stored)} in {len(shards.headers)} files"
    index = shards.root / INDEX_NAME
    metadata = (read_document(index) if is_named(index) else {}).get("metadata")
    total = (as_object(metadata) or {}).get("total_size")
    if total is not None and total != stored:
        note = f"W_INDEX_SIZE: {INDEX_NAME} says {str(total)[:40]} bytes; the tensors decide"
        return Check("weights", "warn", f"{detail}; {note}")
    return Check("weights", "pass", detail)


def _digests(root: Path) -> Check:
    if not is_named(root / MANIFEST):
        return Check("digests", "skip", f"no {MANIFEST}")
    size = verify_manifest(root)
    return Check("digests", "pass", f"{format_bytes(size)} as {MANIFEST} says")


def _try(  # noqa: PLR0917 - one part of the whole
    part: str, root: Path, vocab_size: int, cpu_s: int, checks: list[Check], faults: FaultList
) -> None:
    name = "chat template" if part == "template" else part
    outcome = try_part(part, root, vocab_size, cpu_s=cpu_s)
    fault = outcome.fault
    if fault is not None:
        faults.add(fault.code, fault.where, fault.what, fault.value, fault.fix)
    elif not outcome.detail:
        detail = "W_NO_CHAT_TEMPLATE: chat requests will be refused; set model.chat_template"
        checks.append(Check(name, "warn", detail))
    else:
        checks.append(Check(name, "pass", outcome.detail))
