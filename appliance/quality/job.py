"""Files of a quality run: results that are whole or not there, a baseline, a key."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from appliance.checkpoint.document import as_object
from appliance.checkpoint.writer import storage_errors, write_file
from appliance.quality.measurement import unusable

if TYPE_CHECKING:
    from pathlib import Path

MEASUREMENT = "measurement.json"
COMPARISON = "quality.json"
PLOT = "quality.png"

_ANEW = "store a new baseline: run without --baseline"
_KEY_FILE = "a file with one API key"


def save(directory: Path, name: str, content: bytes) -> None:
    """Write one result.

    Raises:
        ApplianceError: DISK_FULL or OUTPUT_UNWRITABLE, exit 12.
    """
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    write_file(directory / name, content)


def load_baseline(path: Path) -> dict[str, Any]:
    """Read a stored comparison.

    Raises:
        ApplianceError: QUALITY_INPUT, exit 2.
    """
    try:
        stored = as_object(json.loads(path.read_bytes()))
    except OSError as error:
        fix = "name the quality.json of an earlier run"
        raise unusable(str(path), "a quality.json", error.strerror or "unreadable", fix) from None
    except (ValueError, RecursionError) as error:
        raise unusable(str(path), "a quality.json", str(error), _ANEW) from None
    if stored is None or stored.get("format") != 1:
        raise unusable(str(path), "a quality.json of this version", "another document", _ANEW)
    return stored


def read_key(path: Path) -> str:
    """Return the first line of a file with a key.

    Raises:
        ApplianceError: QUALITY_INPUT, exit 2; the key is never part of it.
    """
    try:
        key = path.read_text(encoding="ascii").split("\n", 1)[0].strip()
    except OSError as error:
        fix, reason = "name a file that you may read", error.strerror or "unreadable"
        raise unusable(str(path), _KEY_FILE, reason, fix) from None
    except ValueError:
        fix = "write the key alone into it, in ASCII"
        raise unusable(str(path), _KEY_FILE, "no ASCII text", fix) from None
    if not key:
        fix = "write the key into its first line"
        raise unusable(str(path), _KEY_FILE, "an empty first line", fix)
    return key
