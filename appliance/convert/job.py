"""Runs `appliance convert`: tensor by tensor, the output whole or not there, its values proved."""

from __future__ import annotations

import contextlib
import importlib.metadata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.checkpoint.container_writer import ContainerEntry, write_container
from appliance.checkpoint.document import as_object, load_own, read_document
from appliance.checkpoint.identity import identify
from appliance.checkpoint.rules import Lenient
from appliance.checkpoint.staging import LOCK_NAME, Staging, require_files, require_new
from appliance.checkpoint.writer import (
    ShardWriter,
    TensorSpec,
    plan_shards,
    require_room,
    write_index,
    write_json,
)
from appliance.convert.source import Source, open_source
from appliance.convert.target import Converted, Target, config_of, convert_matrix, decode_dense
from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.quantize.output import copy_small_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

REPORT_NAME = "convert_report.json"
CONTAINER_NAME = "model.qsr"

_SHARD_BYTES = 4 << 30
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_NOT_LINEAR = ("embed_tokens", "norm")
_MATRIX_AXES = 2
_CONTAINER_TYPES = ("U32", "F16", "F32", "F8_E4M3", "BF16", "U8")


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        source: Directory or container.
        target: Directory to make.
        form: What to write.
        allow_rounding: Accept a turned global that moves a weight by one FP32 rounding.
        lenient: What is done with modules of the source that are excluded and packed all the same.
    """

    source: Path
    target: Path
    form: Target
    allow_rounding: bool = False
    lenient: Lenient = Lenient.NONE


def convert(job: Job) -> dict[str, Any]:
    """Write a checkpoint in another form and return the report.

    An output that the same job already made is left as it is, and its report is returned with
    `already_there` true. Unless it is FP16, the digest of
    every module and dense tensor is compared with the source's before the output gets its name.

    Raises:
        ApplianceError: What opening the source raises (exit 30, 31); CONVERT_UNSUPPORTED,
            E_FP16_RANGE (30); CONVERT_INEXACT (30); CONVERT_MISMATCH, OUTPUT_DAMAGED (31);
            OUTPUT_EXISTS, OUTPUT_FOREIGN, OUTPUT_BUSY (2); DISK_FULL, OUTPUT_UNWRITABLE (12).
    """
    with open_source(job.source, job.lenient) as source:
        config = read_document(source.directory / "config.json")
        identity = _identity(job, source)
        made_before = _finished_report(job.target, identity)
        if made_before is not None:
            require_files(job.target, made_before["output"])
            return {**made_before, "already_there": True}
        require_new(job.target)
        _require_quantized(job, source)
        with Staging(job.target, source=source.directory) as staging:
            staging.clear()
            plan = {
                piece.module: convert_matrix(piece.open(), job.form) for piece in source.quantized
            }
            inexact = [name for name, each in plan.items() if each.difference > 0.0]
            difference = max((each.difference for each in plan.values()), default=0.0)
            _refuse_inexact(job, inexact, difference)
            write = _write_container if job.form is Target.CONTAINER else _write_shards
            write(staging.path, source, plan, job.form)
            copy_small_files(source.directory, staging.path)
            stated = _config(config, config_of(job.form, _ignore(source), list(plan.values())))
            write_json(staging.path / "config.json", stated)
            report = {
                "job": identity,
                "modules": len(plan),
                "dense": len(source.dense),
                "dropped": list(source.dropped),
                "notes": list(source.notes),
                "inexact_modules": inexact,
                "largest_difference": difference,
                "weights_sha256": _proved(job, staging.path, exact=not inexact),
                "output": _sizes(staging.path),
            }
            _require_unchanged(job, source, identity)
            write_json(staging.path / REPORT_NAME, report)
            staging.commit()
    return {**report, "already_there": False}


def _require_quantized(job: Job, source: Source) -> None:
    """Refuse to state a quantization over dense tensors only: no reader would take it.

    Raises:
        ApplianceError: CONVERT_UNSUPPORTED, exit 30.
    """
    if source.quantized or job.form is Target.FP16:
        return
    fault = Fault(
        "CONVERT_UNSUPPORTED",
        str(job.source),
        f"quantized matrices, for the form {job.form}",
        "dense tensors only",
        "quantize it first, with `appliance quantize`",
    )
    raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)


def _write_shards(
    directory: Path, source: Source, plan: Mapping[str, Converted], form: Target
) -> None:
    """Write safetensors files of at most 4 GiB, one tensor in memory at a time."""
    pieces = {
        part.name: (piece, part) for piece in source.quantized for part in plan[piece.module].parts
    }
    dense = {piece.name: piece for piece in source.dense}
    specs = [TensorSpec(name, part.dtype, part.array.shape) for name, (_, part) in pieces.items()]
    specs += [TensorSpec(piece.name, piece.dtype, piece.shape) for piece in dense.values()]
    require_room(directory, sum(spec.nbytes for spec in specs))
    shards = plan_shards(specs, limit_bytes=_SHARD_BYTES)
    for shard, inside in shards.items():
        with ShardWriter(directory / shard, inside) as writer:
            for spec in inside:
                if spec.name in dense:
                    writer.write(spec.name, dense[spec.name].array())
                    dense[spec.name].release()
                    continue
                piece, part = pieces[spec.name]
                array = decode_dense(piece.open()) if form is Target.FP16 else part.array
                writer.write(spec.name, array)
                piece.release()
    write_index(directory, shards)


def _write_container(
    directory: Path, source: Source, plan: Mapping[str, Converted], _: Target
) -> None:
    """Write one QUASAR container; its arrays are views on the source's files."""
    entries: list[ContainerEntry] = []
    for name, made in plan.items():
        parts = {part.name.rpartition(".")[2]: (part.dtype, part.array) for part in made.parts}
        rows, words = made.parts[0].array.shape
        codebook = "int4_offset8" if made.is_offset else "e2m1"
        entries.append(ContainerEntry(name, (rows, words * 8), parts, codebook, made.group))
    for piece in source.dense:
        if piece.dtype not in _CONTAINER_TYPES:
            what = f"one of {', '.join(_CONTAINER_TYPES)} in a container"
            fault = Fault(
                "CONVERT_UNSUPPORTED", piece.name, what, piece.dtype, "use --to quasar-st"
            )
            raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)
        entries.append(
            ContainerEntry(piece.name, piece.shape, {"data": (piece.dtype, piece.array())})
        )
    require_room(directory, sum(_nbytes(entry) for entry in entries))
    producer = {"name": "v100-nvfp4-appliance", "version": _version()}
    write_container(directory / CONTAINER_NAME, entries, producer)


def _nbytes(entry: ContainerEntry) -> int:
    return sum(array.nbytes for _, array in entry.parts.values())


def _refuse_inexact(job: Job, inexact: list[str], difference: float) -> None:
    """Refuse globals whose reciprocal moves a weight, unless the user wants just that."""
    if not inexact or job.allow_rounding:
        return
    fault = Fault(
        "CONVERT_INEXACT",
        inexact[0],
        f"the form {job.form} holds the reciprocal of this global without rounding",
        f"weights that differ by up to {difference:.1e} of their value in {len(inexact)} matrices",
        "add --allow-rounding to accept that, or use a form with the same kind of global",
    )
    raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)


def _proved(job: Job, made: Path, *, exact: bool) -> str | None:
    """Return the digest of the output's quantized modules after comparing it with the source's.

    FP16 has no quantized module; a turned global may move weights if the user accepted that.
    """
    if job.form is Target.FP16:
        return None
    after = identify(made)
    if exact:
        before = identify(job.source, lenient=job.lenient)
        values = {name: each.sha256 for name, each in before.dense.items()}
        kept = {name: each.sha256 for name, each in after.dense.items()}
        if before.weights_sha256 != after.weights_sha256 or values != kept:
            what = f"the digest of the source's weights, {before.weights_sha256[:12]}"
            raise _mismatch(made, what, after.weights_sha256[:12])
    return after.weights_sha256


def _require_unchanged(job: Job, source: Source, identity: dict[str, Any]) -> None:
    """Refuse an output whose source changed on the way; FP16 has no digest that would show it."""
    with contextlib.suppress(OSError):
        if _identity(job, source) == identity:
            return
    what, value = "files that stay as they are while they are read", "others than at the start"
    raise _mismatch(job.source, what, value)


def _mismatch(where: Path, what: str, value: str) -> ApplianceError:
    fix = "leave the source alone while it is read; run again"
    fault = Fault("CONVERT_MISMATCH", str(where), what, value, fix)
    return ApplianceError(ExitCode.CHECKPOINT_CORRUPT, fault)


def _sizes(directory: Path) -> dict[str, int]:
    """Bytes of every file of the output, so that a later run of the job sees what was lost."""
    return {
        path.name: path.stat().st_size
        for path in sorted(directory.iterdir())
        if path.name != LOCK_NAME
    }


def _config(config: Mapping[str, Any], quantization: dict[str, Any] | None) -> dict[str, Any]:
    """Return the source's config.json with what is said of quantization replaced."""
    stated = {key: value for key, value in config.items() if key not in _QUANTIZATION_KEYS}
    for key in ("text_config", "llm_config"):
        nested = as_object(stated.get(key))
        if nested is not None:
            stated[key] = {k: v for k, v in nested.items() if k not in _QUANTIZATION_KEYS}
    return stated if quantization is None else {**stated, "quantization_config": quantization}


def _ignore(source: Source) -> list[str]:
    """Name every dense module that could be a linear layer: targets quantize all others."""
    has_packed_head = any(piece.module.endswith("lm_head") for piece in source.quantized)
    found = set[str]() if has_packed_head else {"lm_head"}  # a tied head has no tensor of its own
    for piece in source.dense:
        module, _, kind = piece.name.rpartition(".")
        leaf = module.rpartition(".")[2]
        if kind == "weight" and len(piece.shape) == _MATRIX_AXES and leaf not in _NOT_LINEAR:
            found.add(module)
    return sorted(found)


def _identity(job: Job, source: Source) -> dict[str, Any]:
    """Everything that decides the output's bits."""
    files = {}
    for path in (*source.files, source.directory / "config.json"):
        status = path.stat()
        files[path.name] = {"bytes": status.st_size, "modified_ns": status.st_mtime_ns}
    return {
        "version": _version(),
        "form": str(job.form),
        "allow_rounding": job.allow_rounding,
        "files": files,
    }


def _finished_report(target: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return the report of a finished output of the same job."""
    report = load_own(target / REPORT_NAME)
    if report is None or report.get("job") != identity or as_object(report.get("output")) is None:
        return None
    return report


def _version() -> str:
    return importlib.metadata.version("v100-nvfp4-appliance")
