"""Which files make up a checkpoint, and that each tensor lies in exactly one of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.checkpoint.document import as_object, is_named, read_document
from appliance.checkpoint.faults import FaultList, refuse
from appliance.checkpoint.header import HeaderError, ShardHeader, StoredTensor, read_header
from appliance.checkpoint.weight_map import KEY, parse_index

if TYPE_CHECKING:
    from pathlib import Path

INDEX_NAME = "model.safetensors.index.json"
QUASAR_MAGIC = b"\x1c\x0a\x0d\x0a"

_FILE_NAME = re.compile(r"[^/\\\x00.][^/\\\x00]*\.safetensors")
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_CONVERT = "convert it to safetensors with `appliance convert`"
_REFETCH = "fetch the checkpoint again"


@dataclass(frozen=True)
class Shards:
    """The weight files of one checkpoint.

    Attributes:
        root: Directory.
        headers: File name to header, in the order of the names.
        spare: Safetensors files beside them that the index does not name; never loaded.
    """

    root: Path
    headers: dict[str, ShardHeader]
    spare: tuple[str, ...]

    def locate(self) -> dict[str, tuple[str, StoredTensor]]:
        """Return tensor name to file name and place; the files hold no name twice."""
        return {
            name: (file, tensor)
            for file, header in self.headers.items()
            for name, tensor in header.tensors.items()
        }


def read_shards(root: Path) -> Shards:
    """Read the headers of every weight file of a checkpoint directory.

    Raises:
        ApplianceError: Exit 31 if a file is corrupt, 30 if the directory or a file is missing, is
            no safetensors checkpoint, or index and files disagree.
    """
    present = _present(root)
    place = root / INDEX_NAME  # a link to nowhere is an index that is missing, not one never made
    index = _read_index(place) if is_named(place) else None
    names = sorted(set(index.values())) if index is not None else present
    if not names:
        raise _no_weights(root)
    faults = FaultList()
    if index is None:
        _check_numbering(root, names, faults)
    headers: dict[str, ShardHeader] = {}
    for name in names:
        try:
            headers[name] = read_header(root / name)
        except HeaderError as error:
            faults.add(error.code, str(root / name), error.what, error.value, error.fix)
    faults.raise_if_any(str(root))
    _check_places(root, headers, index, faults)
    faults.raise_if_any(str(root))
    return Shards(root, headers, tuple(sorted(set(present) - set(names))))


def _present(root: Path) -> list[str]:
    """Return the names of the safetensors files of the directory, sorted."""
    where, fix = str(root), "name the directory that holds config.json and the shards"
    try:
        return sorted(path.name for path in root.iterdir() if path.name.endswith(".safetensors"))
    except FileNotFoundError:
        raise refuse("E_PATH", where, "a directory", "nothing there", fix) from None
    except NotADirectoryError:
        if _starts_with_magic(root):
            raise refuse("E_CONTAINER", where, "safetensors", "a QUASAR file", _CONVERT) from None
        raise refuse("E_PATH", where, "a directory", "a file", fix) from None
    except OSError as error:
        fix = "make it readable for the user that serves"
        value = error.strerror or type(error).__name__
        raise refuse("E_UNREADABLE", where, "a readable directory", value, fix) from None


def _starts_with_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(QUASAR_MAGIC)) == QUASAR_MAGIC
    except OSError:
        return False


def _no_weights(root: Path) -> Exception:
    where = str(root)
    container = is_named(root / "model.bin") and is_named(root / "scales.bin")
    if container or any(root.glob("*.qsr")):
        return refuse("E_CONTAINER", where, "safetensors", "a QUASAR container", _CONVERT)
    if any(root.glob("*.bin")) or any(root.glob("*.gguf")):
        found, fix = "weights of another format", "convert the checkpoint to safetensors"
    else:
        found, fix = "no weight file", _REFETCH
    return refuse("E_MISSING_SHARD", where, "at least one .safetensors file", found, fix)


def _read_index(path: Path) -> dict[str, str]:
    """Return tensor name to file name; a file name must be one plain name in the directory."""
    where, fix = str(path), "fetch the index again"
    weight_map = as_object(read_document(path, parse_index).get(KEY))
    if not weight_map:
        raise refuse("E_INDEX_MISMATCH", where, "weight_map: tensor to file", "none", fix)
    try:
        files = sorted(set(weight_map.values()))
    except TypeError:
        files = [""]
    for file in files:
        named = isinstance(file, str) and file.isprintable() and _FILE_NAME.fullmatch(file)
        if not named:
            what = "printable file names without a path, ending in .safetensors"
            raise refuse("E_INDEX_MISMATCH", where, what, repr(file)[:120], fix)
    return weight_map


def _check_numbering(root: Path, names: list[str], faults: FaultList) -> None:
    """Without an index, `NAME-00001-of-00003` still says how many files there should be."""
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            continue
        for number in range(1, int(match[3]) + 1):
            wanted = f"{match[1]}-{number:05}-of-{match[3]}.safetensors"
            if wanted not in names:
                what = "every shard of the numbered set"
                faults.add("E_MISSING_SHARD", str(root / wanted), what, "no such file", _REFETCH)
        return


def _check_places(
    root: Path, headers: dict[str, ShardHeader], index: dict[str, str] | None, faults: FaultList
) -> None:
    total = sum(len(header.forms) for header in headers.values())
    if index is not None and len(index) == total and _all_named(headers, index):
        return
    places = {name: file for file, header in headers.items() for name in header.forms}
    fix = "export the checkpoint again"
    if len(places) != total:
        for file, header in headers.items():
            for name in header.forms:
                if places[name] != file:
                    value = f"{file} and {places[name]}"
                    faults.add("E_DUPLICATE_TENSOR", name, "one shard that holds it", value, fix)
    elif index is not None:
        where = str(root / INDEX_NAME)
        for name in sorted(index.keys() | places.keys()):
            named, found = index.get(name, "no shard"), places.get(name, "no shard")
            if named != found:
                what = f"{name} in {named}"
                faults.add("E_INDEX_MISMATCH", where, what, found, fix)


def _all_named(headers: dict[str, ShardHeader], index: dict[str, str]) -> bool:
    """Tell whether the index places every tensor where it lies; then none lies in two shards."""
    return all(
        set(map(index.get, header.forms)) <= {file}  # a shard may be empty
        for file, header in headers.items()
    )
