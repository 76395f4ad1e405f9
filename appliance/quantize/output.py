"""Everything of the output that is not a tensor: configuration, tokenizer and other small files."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Any

from appliance.checkpoint.faults import refuse
from appliance.checkpoint.shards import INDEX_NAME
from appliance.checkpoint.writer import write_file, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_CONFIG_NAME = "config.json"
_SKIPPED_NAMES = {
    _CONFIG_NAME,
    INDEX_NAME,
    "import_report.json",
    "quantize_report.json",
    "quantize_report.png",
    "convert_report.json",
    "hf_quant_config.json",
    "quasar_index.json",
    "SHA256SUMS",  # of the source's files
}
_WEIGHT_SUFFIXES = {
    ".bin",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".part",
    ".pt",
    ".pth",
    ".qsr",
    ".safetensors",
}


def write_config(
    directory: Path, config: Mapping[str, Any], quantization_config: Mapping[str, Any]
) -> None:
    """Write the source's config.json with the quantization_config added."""
    stated = {**config, "quantization_config": dict(quantization_config)}
    write_json(directory / _CONFIG_NAME, stated)


def copy_small_files(source: Path, directory: Path) -> None:
    """Copy tokenizer, chat template, generation config, licence: every file that holds no weights.

    Raises:
        ApplianceError: E_UNREADABLE, exit 30; DISK_FULL or OUTPUT_UNWRITABLE, exit 12.
    """
    for path in sorted(source.iterdir()):
        skipped = path.name in _SKIPPED_NAMES or path.name.startswith(".")
        if not skipped and path.suffix not in _WEIGHT_SUFFIXES and _is_meant(path):
            write_file(directory / path.name, _read(path))


def _is_meant(path: Path) -> bool:
    """Whether it is a file, or a link that should lead to one: a lost tokenizer must be told."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return True


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        fix = "make it readable, or remove it from the source"
        raise refuse("E_UNREADABLE", str(path), "a readable file", reason, fix) from None
