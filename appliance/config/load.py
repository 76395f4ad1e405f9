"""Loads the one configuration file; every fault of it is reported in one run."""

from __future__ import annotations

import hashlib
import re
import stat
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

from pydantic import ValidationError

from appliance.config.cautions import cautions
from appliance.config.document import Document, Value, parse_document
from appliance.config.faults import schema_faults
from appliance.config.rules import verify_all
from appliance.config.schema import Config
from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.units import MIB

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_BYTES = MIB
_PLACEHOLDERS: dict[str, Value] = {"version": 1, "model": {"path": "/"}}


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration and where each of its keys was written.

    Attributes:
        config: The values, defaults filled in.
        path: The file.
        sha256: Digest of the file's bytes, hexadecimal.
        lines: Key to line, from 1, of the keys that the file states.
        warnings: Values that are allowed and deserve a second look, one sentence each.
    """

    config: Config
    path: Path
    sha256: str
    lines: Mapping[str, int] = field(default_factory=dict[str, int])
    warnings: tuple[str, ...] = ()

    def where(self, key: str) -> str:
        """Return `file:line key`; a key the file leaves out is shown at its nearest section."""
        return locate(str(self.path), self.lines, key)


def locate(name: str, lines: Mapping[str, int], key: str) -> str:
    """Return `file:line key` with the line of the key or of the section it would stand in."""
    part = key
    while part and part not in lines:
        part = part.rpartition("[" if part.endswith("]") else ".")[0]
    return f"{name}:{lines.get(part, 1)} {key}"


def load_config(path: Path, *, today: date | None = None) -> LoadedConfig:
    """Read, check and return the configuration file.

    Args:
        path: The YAML file; a regular file of at most 1 MiB.
        today: Day from which overrides count, the current day (UTC) by default.

    Raises:
        ApplianceError: Exit 10 with every fault of the file.
    """
    content = _read(path)
    name = str(path)
    document = parse_document(_decode(content, name), name)
    config, faults = _validate(document, today or datetime.now(UTC).date())
    if faults or config is None:
        raise ApplianceError(ExitCode.CONFIG, *sorted(faults, key=_line_of))
    loaded = LoadedConfig(config, path, hashlib.sha256(content).hexdigest(), document.lines)
    warnings = tuple(cautions(config, loaded.where))
    return LoadedConfig(config, path, loaded.sha256, document.lines, warnings)


def _validate(document: Document, today: date) -> tuple[Config | None, list[Fault]]:
    """Return the configuration and all faults; rules are judged on what is valid by itself."""

    def where(key: str) -> str:
        return locate(document.name, document.lines, key)

    refused: dict[str, Fault] = {}
    config: Config | None = None
    try:
        config = sound = Config.model_validate(document.data)
    except ValidationError as error:
        found = schema_faults(error.errors(include_url=False), document.data, where)
        refused = {item.key: item.fault for item in found}
        sound = Config.model_validate(_without(document.data, list(refused)))
    broken = [
        rule.fault
        for rule in verify_all(sound, where, today)
        if not any(_touches(key, other) for key in rule.keys for other in refused)
    ]
    return config, [*document.faults, *refused.values(), *broken]


def _without(data: dict[str, Value], keys: list[str]) -> dict[str, Value]:
    """Return the values without the faulty keys; required ones get a stand-in, lists go whole."""
    faulty = {re.sub(r"\[\d+\].*", "", key) for key in keys}
    kept = _prune(data, "", faulty)
    for name, value in _PLACEHOLDERS.items():
        if isinstance(value, dict):
            section = kept.get(name)
            kept[name] = {**value, **section} if isinstance(section, dict) else value
        else:
            kept.setdefault(name, value)
    return kept


def _prune(data: dict[str, Value], prefix: str, faulty: set[str]) -> dict[str, Value]:
    kept: dict[str, Value] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if key not in faulty:
            kept[name] = _prune(value, f"{key}.", faulty) if isinstance(value, dict) else value
    return kept


def _touches(key: str, other: str) -> bool:
    """Tell whether one of two keys is the other or contains it."""
    longer, shorter = (key, other) if len(key) >= len(other) else (other, key)
    return longer == shorter or longer.startswith((f"{shorter}.", f"{shorter}["))


def _read(path: Path) -> bytes:
    """Return the bytes; a pipe or a device is refused before it can block or never end."""
    what, fix = "must be a readable file", "name the configuration file by --config"
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
            raise ApplianceError(ExitCode.CONFIG, Fault("CONFIG_FILE", str(path), what, kind, fix))
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or str(error)
        fault = Fault("CONFIG_FILE", str(path), what, reason, fix)
        raise ApplianceError(ExitCode.CONFIG, fault) from None
    if len(content) > MAX_BYTES:
        fault = Fault(
            "CONFIG_SIZE", str(path), "must be at most 1 MiB", "more", "start from appliance.yaml"
        )
        raise ApplianceError(ExitCode.CONFIG, fault)
    return content


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        value = f"byte 0x{content[error.start]:02x}"
        fix = "save the file as UTF-8"
        fault = Fault("CONFIG_ENCODING", f"{name}:{line}", "must be UTF-8 text", value, fix)
        raise ApplianceError(ExitCode.CONFIG, fault) from None


def _line_of(fault: Fault) -> int:
    match = re.search(r":(\d+)(?: |$)", fault.where)
    return int(match[1]) if match else 0
