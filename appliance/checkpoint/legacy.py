"""The two older QUASAR forms, read only: scales and codes without names, which an index gives.

Inline: magic, a count of groups G, G FP16 scales, zeros to a multiple of 4, 64 bytes of codes a
group. Split: the codes in one file, the scales in another, no header.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from appliance.checkpoint.container import (
    EXTENDED,
    MAGIC,
    Container,
    ContainerTensor,
    is_container,
    read_container,
    read_span,
    read_start,
    sound_name,
    sound_scheme,
    sound_shape,
)
from appliance.checkpoint.document import (
    as_list,
    as_object,
    is_directory,
    is_named,
    is_regular,
    read_document,
)
from appliance.checkpoint.faults import refuse
from appliance.checkpoint.segments import Segment
from appliance.checkpoint.stored import QUASAR_GROUP

if TYPE_CHECKING:
    from pathlib import Path

INDEX_NAME: Final = "quasar_index.json"

_START: Final = 8
_CODE_BYTES: Final = QUASAR_GROUP // 2
_SCALE_BYTES: Final = 2
_REFETCH: Final = "fetch the files again"


def open_container(path: Path, index: Path | None = None) -> Container:
    """Read a QUASAR container of any form.

    Args:
        path: The file; of the split form `[NAME.]model.bin` or `[NAME.]scales.bin`; or a directory
            with one container.
        index: `quasar_index.json` of a legacy form; None looks beside the file.

    Raises:
        ApplianceError: What `read_container` raises; E_LEGACY_NO_INDEX (30) without an index,
            E_LEGACY_SIZE (31) if file and index do not belong together.
    """
    place = _with_codes(_in_directory(path))
    beside = place.parent / INDEX_NAME
    wanted = beside if index is None and is_named(beside) else index
    if not is_container(place):
        scales = _scales_beside(place)
        if scales is not None:
            return _read_split(place, scales, _required(place, wanted))
    start, size = read_start(place, _START)
    groups = int.from_bytes(start[4:_START], "little")
    if start[:4] != MAGIC or groups == EXTENDED:
        return read_container(place)
    return _read_inline(place, groups, size, _required(place, wanted))


def is_quasar(path: Path) -> bool:
    """Tell whether a path is a container of any form, or a directory of nothing else."""
    if is_regular(path):
        name = path.name
        is_split = name.endswith(("model.bin", "scales.bin"))
        return is_container(path) or path.suffix == ".qsr" or is_split
    return is_directory(path) and find_container(path) is not None


def find_container(root: Path) -> Path | None:
    """Return the container in a directory without safetensors, None if there is none."""
    if any(root.glob("*.safetensors")):
        return None
    names = [*sorted(root.glob("*.qsr")), root / "model.bin"]
    return next((path for path in names if is_regular(path)), None)


def _in_directory(path: Path) -> Path:
    if not is_directory(path):
        return path
    found = find_container(path)
    if found is None:
        fix = "name the file"
        raise refuse("E_MISSING_SHARD", str(path), "a .qsr file or model.bin", "none", fix)
    return found


def _with_codes(path: Path) -> Path:
    """Return the file with the codes where the one with the scales of the split form is named."""
    if not path.name.endswith("scales.bin") or is_container(path):
        return path
    codes = path.with_name(f"{path.name.removesuffix('scales.bin')}model.bin")
    return codes if is_regular(codes) else path


def _scales_beside(path: Path) -> Path | None:
    """Return `[NAME.]scales.bin` for `[NAME.]model.bin`, None if there is none."""
    if not path.name.endswith("model.bin"):
        return None
    scales = path.with_name(f"{path.name.removesuffix('model.bin')}scales.bin")
    return scales if is_regular(scales) else None


def _required(path: Path, index: Path | None) -> Path:
    if index is None:
        what = f"{INDEX_NAME} beside it: the legacy form names no tensor"
        fix = "get the index from whoever wrote the file"
        raise refuse("E_LEGACY_NO_INDEX", str(path), what, "none", fix)
    return index


def _read_inline(path: Path, groups: int, size: int, index: Path) -> Container:
    scales_end = _START + _SCALE_BYTES * groups
    codes_begin = -(-scales_end // 4) * 4
    wanted = codes_begin + _CODE_BYTES * groups
    if size != wanted:
        what = f"{wanted} bytes for {groups} groups"
        raise refuse("E_LEGACY_SIZE", str(path), what, str(size), _REFETCH)
    if any(read_span(path, scales_end, codes_begin - scales_end)):
        what = "zeros between scales and codes"
        raise refuse("E_LEGACY_SIZE", str(path), what, "others", _REFETCH)
    tensors = _tensors(index, groups, scales_begin=_START, codes_begin=codes_begin)
    return Container(path, tensors, is_legacy=True)


def _read_split(path: Path, scales: Path, index: Path) -> Container:
    codes_bytes, scale_bytes = path.stat().st_size, scales.stat().st_size
    groups = codes_bytes // _CODE_BYTES
    if codes_bytes != groups * _CODE_BYTES or scale_bytes != groups * _SCALE_BYTES:
        what = f"{_CODE_BYTES} bytes of codes and {_SCALE_BYTES} of scales a group"
        value = f"{codes_bytes} and {scale_bytes} bytes"
        raise refuse("E_LEGACY_SIZE", f"{path} and {scales.name}", what, value, _REFETCH)
    tensors = _tensors(index, groups, scales_begin=0, codes_begin=0)
    return Container(path, tensors, is_legacy=True, scales_path=scales)


def _tensors(
    index: Path, groups: int, *, scales_begin: int, codes_begin: int
) -> tuple[ContainerTensor, ...]:
    """Deal the groups out to the tensors of the index: tensor by tensor, row by row."""
    codebook, order = _read_index(index)
    found: dict[str, ContainerTensor] = {}
    at = 0
    for entry in order:
        table = as_object(entry) or {}
        name = sound_name(str(index), table.get("name"))
        where = f"{index} {name}"
        if name in found:
            raise refuse("E_DUPLICATE_TENSOR", where, "one entry", "two", "repair the index")
        shape = sound_shape(where, table.get("shape"))
        if len(shape) != 2 or shape[1] % QUASAR_GROUP:  # noqa: PLR2004 - a matrix
            what = f"[N, K] with K a multiple of {QUASAR_GROUP}"
            raise refuse("E_SHAPE", where, what, str(list(shape)), "repair the index")
        count = math.prod(shape) // QUASAR_GROUP
        scales, codes = scales_begin + _SCALE_BYTES * at, codes_begin + _CODE_BYTES * at
        segments = {
            "qweight": Segment(
                "U32", (shape[0], shape[1] // 8), codes, codes + count * _CODE_BYTES
            ),
            "scales": Segment(
                "F16", (shape[0], shape[1] // QUASAR_GROUP), scales, scales + count * _SCALE_BYTES
            ),
        }
        found[name] = ContainerTensor(name, shape, segments, codebook, QUASAR_GROUP)
        at += count
    if at != groups:
        what, value = f"tensors of {groups} groups, as the file has", str(at)
        raise refuse("E_LEGACY_SIZE", str(index), what, value, "take the index of this file")
    return tuple(found.values())


def _read_index(index: Path) -> tuple[str, list[Any]]:
    table = read_document(index)
    stated = (table.get("format"), table.get("version"))
    if stated != ("quasar-legacy", "0"):
        what = 'format "quasar-legacy", version "0"'
        raise refuse("E_VERSION", str(index), what, repr(stated)[:120], "repair the index")
    codebook, group = sound_scheme(str(index), table)
    order = as_list(table.get("order"))
    if order is None or group != QUASAR_GROUP:
        what = f"an order of tensors, groups of {QUASAR_GROUP}"
        raise refuse("E_GROUP_SIZE", str(index), what, str(group), "repair the index")
    return codebook, order
