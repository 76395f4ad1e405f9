"""What `model inspect` says of a QUASAR container: its directory, no weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.checkpoint.legacy import open_container
from appliance.units import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.checkpoint.container import ContainerTensor


def describe(path: Path, index: Path | None = None) -> dict[str, Any]:
    """Return the directory of a container as plain values; sizes in bytes.

    Raises:
        ApplianceError: What `open_container` raises.
    """
    container = open_container(path, index)
    return {
        "path": str(container.path),
        "format": "quasar-container",
        "form": _form(container.is_legacy, apart=container.scales_path is not None),
        "checksums": container.has_checksums,
        "producer": dict(container.producer),
        "tensors": {tensor.name: _tensor(tensor) for tensor in container.tensors},
    }


def table(found: dict[str, Any]) -> str:
    """Return the description as aligned lines."""
    tensors: dict[str, dict[str, Any]] = found["tensors"]
    rows = [
        ("path", found["path"]),
        ("format", f"QUASAR container, {found['form']}"),
        ("checksums", "yes" if found["checksums"] else "none"),
        (
            "tensors",
            f"{len(tensors)}, {format_bytes(sum(each['bytes'] for each in tensors.values()))}",
        ),
    ]
    rows += [
        (f"  {each['kind']}", f"{name} {each['shape']}") for name, each in sorted(tensors.items())
    ]
    rows.append(("note", "only safetensors are served: convert it with `appliance convert`"))
    return "".join(f"{name:<20}{value}\n" for name, value in rows)


def _form(is_legacy: bool, *, apart: bool) -> str:
    if not is_legacy:
        return "1.0"
    return "legacy split" if apart else "legacy inline"


def _tensor(tensor: ContainerTensor) -> dict[str, Any]:
    size = sum(part.end - part.begin for part in tensor.segments.values())
    kind = "dense" if tensor.is_dense else f"{tensor.codebook} of {tensor.group_size}"
    return {"kind": kind, "shape": list(tensor.shape), "bytes": size}
