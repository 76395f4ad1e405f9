"""`appliance model inspect`: what a checkpoint is, from headers and configuration alone."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.checkpoint.legacy import is_quasar
from appliance.checkpoint.read import read_checkpoint, summarize
from appliance.commands._container import describe, table
from appliance.commands._lenient import add_lenient
from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.plan.shapes import rank_shapes
from appliance.plan.split import Split, obstacles
from appliance.units import format_bytes

if TYPE_CHECKING:
    from appliance.checkpoint.summary import CheckpointSummary
    from appliance.plan.shapes import RankShape

MOST_RANKS = 64
HELP = "show what a checkpoint is, from headers and configuration alone"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "directory", type=Path, metavar="PATH", help="a checkpoint's directory or a container file"
    )
    parser.add_argument(
        "--index", type=Path, metavar="FILE", help="quasar_index.json of a legacy container"
    )
    parser.add_argument(
        "--tensor",
        type=_width,
        metavar="N",
        help="list the matrices of one rank of N, with padding",
    )
    add_lenient(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _width(text: str) -> int:
    """Return a number of ranks; argparse turns its own error into a usage line."""
    if not (text.isdecimal() and 1 <= int(text) <= MOST_RANKS):
        raise argparse.ArgumentTypeError(f"must be from 1 to {MOST_RANKS}, got {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Inspect, print and return 0.

    Raises:
        ApplianceError: Exit 30 if the checkpoint is not served, 31 if a file is corrupt.
    """
    if is_quasar(arguments.directory):
        return _inspect_container(arguments)
    summary = summarize(arguments.directory, arguments.lenient)
    shapes = _shapes(summary, arguments) if arguments.tensor else ()
    for note in (*path_remarks(arguments.directory), *summary.notes):
        if note.startswith("W_"):
            sys.stderr.write(f"warning {note}\n")
    if arguments.json:
        cut = {"shapes": [asdict(each) | {"padded": each.padded} for each in shapes]}
        report = as_json(summary) | (cut if arguments.tensor else {})
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        sys.stdout.write(as_table(summary) + "".join(map(_shape_line, shapes)))
    return ExitCode.OK


def _shapes(summary: CheckpointSummary, arguments: argparse.Namespace) -> tuple[RankShape, ...]:
    """Return the matrices of one rank of a tensor-parallel cut.

    Raises:
        ApplianceError: TP_INVALID or E_TP_GROUP (exit 10) with everything that stands against it.
    """
    split = Split(tensor=arguments.tensor)
    against = obstacles(summary, split)
    if against:
        fix = "name a width that divides all of it"
        place = f"--tensor {split.tensor}"
        faults = [Fault(each.code, place, each.what, each.value, fix) for each in against]
        raise ApplianceError(ExitCode.CONFIG, *faults)
    found = read_checkpoint(arguments.directory, arguments.lenient)
    kinds = found.outline.kinds
    forms = {kind: found.tallies[kinds.index(kind)].forms for kind in set(kinds)}
    return rank_shapes(found.outline, forms, split)


def _shape_line(shape: RankShape) -> str:
    padded = "" if shape.padded == (shape.rows, shape.columns) else ", padded to {} x {}"
    size = f"{shape.rows} x {shape.columns}{padded.format(*shape.padded)}"
    return f"{'  rank':<20}{shape.module}: {size}, {shape.form}, {shape.count} of them\n"


def _inspect_container(arguments: argparse.Namespace) -> int:
    found = describe(arguments.directory, arguments.index)
    text = json.dumps(found, indent=2) + "\n" if arguments.json else table(found)
    sys.stdout.write(text)
    return ExitCode.OK


def path_remarks(path: Path) -> tuple[str, ...]:
    """Return a remark on a path that other tools are known to trip over."""
    text = str(path)
    if text.isascii() and " " not in text:
        return ()
    return (f"W_PATH: {text!r} has spaces or non-ASCII letters, which trip other tools",)


def as_json(summary: CheckpointSummary) -> dict[str, Any]:
    """Return the summary as plain values; sizes in bytes."""
    geometry = summary.geometry
    return {
        "path": str(summary.path),
        "format": summary.format,
        "producer": summary.producer,
        "group_size": summary.group_size,
        "architecture": geometry.architecture,
        "layers": {
            "attention": geometry.attention_layers,
            "recurrent": geometry.recurrent_layers,
        },
        "hidden_size": geometry.hidden_size,
        "heads": geometry.num_heads,
        "kv_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "experts": geometry.num_experts,
        "experts_per_token": geometry.experts_per_token,
        "vocab_size": geometry.vocab_size,
        "tied_embeddings": geometry.tied_embeddings,
        "max_position": geometry.max_position,
        "kv_bytes_per_token": geometry.kv_bytes_per_token(),
        "state_bytes_per_sequence": geometry.state_bytes_per_sequence,
        "bytes": {kind.value: count for kind, count in summary.bytes_by_kind().items()},
        "tensors": summary.tensor_count,
        "files": dict(summary.files),
        "has_tokenizer": summary.has_tokenizer,
        "has_chat_template": summary.has_chat_template,
        "digest": summary.digest,
        "notes": list(summary.notes),
    }


def as_table(summary: CheckpointSummary) -> str:
    """Return the summary as aligned lines."""
    geometry = summary.geometry
    layers = f"{geometry.attention_layers} attention"
    if geometry.recurrent_layers:
        layers += f", {geometry.recurrent_layers} recurrent"
    producer = "" if summary.producer == "none" else f" by {summary.producer}"
    group = f", groups of {summary.group_size}" if summary.group_size else ""
    rows = [
        ("path", str(summary.path)),
        ("format", f"{summary.format}{producer}{group}"),
        ("architecture", geometry.architecture),
        ("layers", layers),
        ("heads", f"{geometry.num_heads} query, {geometry.num_kv_heads} KV of {geometry.head_dim}"),
        *_expert_rows(summary),
        ("vocabulary", f"{geometry.vocab_size}{', tied' if geometry.tied_embeddings else ''}"),
        ("context", f"{geometry.max_position} tokens"),
        ("KV cache", f"{format_bytes(geometry.kv_bytes_per_token())} a token in FP16"),
        *_state_rows(summary),
        ("tensors", f"{summary.tensor_count} in {len(summary.files)} files"),
        ("tokenizer", "yes" if summary.has_tokenizer else "missing"),
        ("chat template", "yes" if summary.has_chat_template else "missing"),
    ]
    total = sum(summary.bytes_by_kind().values())
    rows += [
        (f"  {kind.value}", format_bytes(count)) for kind, count in summary.bytes_by_kind().items()
    ]
    rows.append(("  all", format_bytes(total)))
    rows += [("note", note) for note in summary.notes]
    return "".join(f"{name:<20}{value}\n" for name, value in rows)


def _expert_rows(summary: CheckpointSummary) -> list[tuple[str, str]]:
    geometry = summary.geometry
    if not geometry.num_experts:
        return []
    used = f"{geometry.num_experts} a layer, {geometry.experts_per_token} a token"
    return [("experts", used)]


def _state_rows(summary: CheckpointSummary) -> list[tuple[str, str]]:
    state = summary.geometry.state_bytes_per_sequence
    return [("recurrent state", f"{format_bytes(state)} a sequence")] if state else []
