"""Runs `appliance quantize`: shard by shard, resumable, the output whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from appliance.checkpoint.document import load_own, read_document
from appliance.checkpoint.read import read_checkpoint
from appliance.checkpoint.staging import Staging, require_new, require_whole
from appliance.checkpoint.tensors import TensorReader, open_tensors
from appliance.checkpoint.tied import check_tied
from appliance.checkpoint.writer import (
    require_room,
    storage_errors,
    write_file,
    write_index,
    write_json,
)
from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.quantize.encode import Encoder, judge
from appliance.quantize.finite import require_finite
from appliance.quantize.layout import Layout, make_layout
from appliance.quantize.output import copy_small_files, write_config
from appliance.quantize.plot import draw_report
from appliance.quantize.progress import Progress
from appliance.quantize.report import ShardResult, load_shard, make_report, save_shard

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.quantize.codes import CalibratedCodes
    from appliance.quantize.settings import Calibration, Settings

REPORT_NAME = "quantize_report.json"
PLOT_NAME = "quantize_report.png"

_JOURNAL = ".quantize"
_JOB_NAME = "job.json"


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        source: Directory of the dense checkpoint.
        target: Directory to make.
        settings: How weights are encoded.
    """

    source: Path
    target: Path
    settings: Settings


def quantize(job: Job, stream: TextIO) -> dict[str, Any]:
    """Write the 4-bit checkpoint of a dense one and return its report.

    An output that the same job already made is left as it is, and its report is returned with
    `already_there` true; a run that was killed is continued.

    Args:
        job: What to do.
        stream: Where progress goes, normally stderr.

    Raises:
        ApplianceError: Exit 30 or 31 for the source (`open_tensors`, `make_layout`,
            `read_checkpoint`, `check_tied`, QUANT_NOT_FINITE, QUANT_WEIGHT_RANGE,
            QUANT_SOURCE_CHANGED), 60 for QUANT_ERROR_LIMIT, 2 for QUANT_CALIBRATION,
            OUTPUT_EXISTS, OUTPUT_FOREIGN, OUTPUT_BUSY and LIBRARY_MISSING, 31 for
            OUTPUT_DAMAGED, 12 for DISK_FULL and OUTPUT_UNWRITABLE.
    """
    with open_tensors(job.source) as reader:
        config = read_document(job.source / "config.json")
        layout = make_layout(reader, config, job.settings.scheme)
        found = read_checkpoint(job.source)  # what is not served dense is not in 4 bits either
        check_tied(found.config, found.shards)
        identity = _identity(job, reader)
        made_before = _finished_report(job.target, identity)
        if made_before is not None:
            _require_whole(job.target, layout)
            return {**made_before, "already_there": True}
        require_new(job.target)
        threads, is_free = job.settings.threads, job.settings.allow_not_finite
        require_finite(reader, layout, threads=threads, is_dense_free=is_free)
        with Staging(job.target, source=job.source) as staging:
            _open_journal(staging, identity)
            begun = time.monotonic()
            calibrated = _calibrate(job, reader, layout, staging, stream)
            seconds = time.monotonic() - begun
            results = _write_shards(job, reader, layout, staging, stream, calibrated)
            report = make_report(
                identity, results, error_limit=job.settings.error_limit, before_s=seconds
            )
            copy_small_files(job.source, staging.path)
            write_config(staging.path, config, job.settings.scheme.config(layout.ignore))
            write_json(staging.path / REPORT_NAME, report)
            plot = draw_report(report)
            if plot is not None:
                write_file(staging.path / PLOT_NAME, plot)
            write_index(staging.path, layout.specs())
            with storage_errors(staging.path):
                shutil.rmtree(staging.path / _JOURNAL)
            _require_unchanged(job, reader, identity)
            staging.commit()
    return {**report, "already_there": False}


def _calibrate(
    job: Job, reader: TensorReader, layout: Layout, staging: Staging, stream: TextIO
) -> CalibratedCodes | None:
    """Make or take over the codes of every matrix in mode `calibrated`; None in the others."""
    if job.settings.calibration is None:
        return None
    # Not above: torch, which the other modes do without.
    module = importlib.import_module("appliance.quantize.calibrate")
    codes: CalibratedCodes = module.calibrate_layers(
        reader,
        layout,
        staging.path / _JOURNAL / "calibration",
        calibration=job.settings.calibration,
        threads=job.settings.threads,
        tell=Progress(stream, weights=layout.weights, shards=len(layout.shards)).layer,
    )
    return codes


def _write_shards(  # noqa: PLR0917 - the parts of one run
    job: Job,
    reader: TensorReader,
    layout: Layout,
    staging: Staging,
    stream: TextIO,
    calibrated: CalibratedCodes | None,
) -> list[ShardResult]:
    """Write every shard that an earlier run of the same job has not finished."""
    journal = staging.path / _JOURNAL
    specs = layout.specs()
    done = {
        shard: result
        for shard in layout.shards
        if (result := load_shard(journal / f"{shard}.json")) and (staging.path / shard).is_file()
    }
    left = [spec for shard in layout.shards if shard not in done for spec in specs[shard]]
    require_room(staging.path, sum(spec.nbytes for spec in left))
    progress = Progress(stream, weights=layout.weights, shards=len(layout.shards))
    results: list[ShardResult] = []
    try:
        encoder = Encoder(
            reader,
            layout.modules,
            settings=job.settings,
            advance=progress.advance,
            calibrated=calibrated,
        )
        for shard, items in layout.shards.items():
            resumed = done.get(shard)
            result = resumed or encoder.shard(staging.path / shard, items)
            if resumed is None:
                save_shard(journal / f"{shard}.json", result)
            for tensor in result.tensors:
                judge(tensor, job.settings.error_limit)
            for note in result.notes:
                progress.note(note)
            progress.shard(result, resumed=resumed is not None)
            results.append(result)
    finally:
        progress.close()
    return results


def _open_journal(staging: Staging, identity: dict[str, Any]) -> None:
    """Go on with what the same job left, or start afresh."""
    journal = staging.path / _JOURNAL
    if load_own(journal / _JOB_NAME) != identity:
        staging.clear()
        with storage_errors(journal):
            journal.mkdir()
        write_json(journal / _JOB_NAME, identity)


def _identity(job: Job, reader: TensorReader) -> dict[str, Any]:
    """Everything that decides the output's bits: shards of two identities are never mixed."""
    shards: dict[str, Any] = {}
    for shard in reader.shards:
        status = (reader.root / shard).stat()
        header = repr(reader.in_shard(shard)).encode()
        shards[shard] = {
            "bytes": status.st_size,
            "modified_ns": status.st_mtime_ns,
            "header_sha256": hashlib.sha256(header).hexdigest(),
        }
    config = (reader.root / "config.json").read_bytes()
    return {
        "version": importlib.metadata.version("v100-nvfp4-appliance"),
        "mode": str(job.settings.mode),
        **_text_identity(job.settings.calibration),
        "config_sha256": hashlib.sha256(config).hexdigest(),
        "shards": shards,
    }


def _require_unchanged(job: Job, reader: TensorReader, identity: dict[str, Any]) -> None:
    """Refuse an output whose source changed on the way: it could be of two models.

    Raises:
        ApplianceError: QUANT_SOURCE_CHANGED, exit 31.
    """
    with contextlib.suppress(OSError):
        if _identity(job, reader) == identity:
            return
    fault = Fault(
        "QUANT_SOURCE_CHANGED",
        str(job.source),
        "files that stay as they are while they are read",
        "others than when the run began",
        "leave the source alone; run again",
    )
    raise ApplianceError(ExitCode.CHECKPOINT_CORRUPT, fault)


def _text_identity(calibration: Calibration | None) -> dict[str, Any]:
    """What decides the activations.

    Raises:
        ApplianceError: QUANT_CALIBRATION, exit 2, if the text cannot be read.
    """
    if calibration is None:
        return {}
    try:
        with calibration.text.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        fault = Fault(
            "QUANT_CALIBRATION",
            str(calibration.text),
            "a readable UTF-8 text file",
            error.strerror or type(error).__name__,
            "name another file with --calibration",
        )
        raise ApplianceError(ExitCode.USAGE, fault) from None
    return {"calibration_sha256": digest, "calibration_tokens": calibration.tokens}


def _finished_report(target: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return the report of a finished output of the same job."""
    report = load_own(target / REPORT_NAME)
    return report if report is not None and report.get("job") == identity else None


def _require_whole(target: Path, layout: Layout) -> None:
    specs = (spec for shard in layout.specs().values() for spec in shard)
    require_whole(target, {spec.name: (spec.dtype, spec.shape) for spec in specs})
