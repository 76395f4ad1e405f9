"""Packed weights in the kernels' own layout: made from canonical tensors after loading, checked."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.nvfp4 import abi
from appliance.vllm_plugin.device import library_of, room, stream_of
from appliance.vllm_plugin.spotcheck import check_tile, last_tile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.vllm_plugin.canonical import Packed

_SCALE_TYPES = {
    torch.float8_e4m3fn: abi.Type.E4M3,
    torch.float16: abi.Type.F16,
    torch.float32: abi.Type.F32,
}
_OUT_TYPES = {torch.float16: abi.Type.F16, torch.float32: abi.Type.F32}


@dataclass(frozen=True)
class Resident:
    """One weight, or one of each expert, as the kernels read it.

    Attributes:
        buffer: uint8, on the device: codes, scales and globals.
        handle: uint8, on the host: the C struct that describes the buffer, by its address.
        experts: 1 for a dense weight.
        rows: Rows of one expert.
        columns: Columns, a multiple of 16.
    """

    buffer: torch.Tensor
    handle: torch.Tensor
    experts: int
    rows: int
    columns: int

    @property
    def weight(self) -> abi.Weight:
        """The C struct, in place."""
        return abi.Weight.from_address(self.handle.data_ptr())


def pack(packed: Packed, kind: abi.WeightKind, experts: int = 1) -> Resident:
    """Repack canonical tensors for the kernels, and compare a tile of each part with the oracle.

    Costs the memory of one more copy of these tensors, until the caller drops them.

    Args:
        packed: Rows of all experts, one after the other.
        kind: What the rows are; GATE_UP rows are gate first, then up, within an expert.
        experts: Experts in `packed`; their rows are equally many.

    Raises:
        ApplianceError: E_SELF_TEST if a tile differs.
        LibraryError: If the library is missing, or refuses scales or globals.
    """
    device, library = packed.codes.device, library_of(packed.codes.device)
    rows, columns = packed.codes.shape[0] // experts, packed.codes.shape[1] * 2
    global_kind = abi.GlobalKind.DIVISOR if packed.divisor else abi.GlobalKind.MULTIPLIER
    desc = abi.WeightDesc(
        kind=kind,
        experts=experts,
        n=rows,
        k=columns,
        group=packed.group,
        scale_type=_SCALE_TYPES[packed.scales.dtype],
        global_kind=global_kind,
    )
    buffer = room(library.weight_bytes(desc), device)
    weight = library.weight_create(
        desc, buffer.data_ptr(), buffer.numel(), stream=stream_of(device)
    )
    _fill(weight, packed)
    handle = torch.frombuffer(bytearray(bytes(weight)), dtype=torch.uint8)
    resident = Resident(buffer, handle, experts, rows, columns)
    _check(resident, packed)
    return resident


def decode(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Decode canonical tensors with the kernels' own layout in between, one layer at a time.

    Returns:
        [N, K] of `dtype`, float16 or float32: the FP32 value nearest to the exact one, rounded once
        more for FP16.

    Raises:
        ApplianceError: E_SELF_TEST if a tile differs.
        LibraryError: If the library is missing, or refuses scales or globals.
    """
    resident = pack(packed, abi.WeightKind.LINEAR)
    out = torch.empty(
        packed.codes.shape[0], resident.columns, dtype=dtype, device=packed.codes.device
    )
    _decode_rows(resident, out, expert=0, row_begin=0)
    return out


def _fill(weight: abi.Weight, packed: Packed) -> None:
    codes, scales = packed.codes.contiguous(), packed.scales.contiguous()
    device, library = codes.device, library_of(codes.device)
    row_globals = packed.globals.to(device)
    report = room(ctypes.sizeof(abi.Report), device)
    stream = stream_of(device)
    library.report_reset(report.data_ptr(), stream=stream)
    for expert in range(weight.experts):
        begin = expert * weight.n
        source = abi.Source(
            group=weight.group,
            scale_type=weight.scale_type,
            global_kind=weight.global_kind,
            n=weight.n,
            k=weight.k,
            codes=codes[begin:].data_ptr(),
            codes_stride=codes.shape[1],
            scales=scales[begin:].data_ptr(),
            scales_stride=scales.shape[1],
            globals=row_globals[begin:].data_ptr(),
        )
        library.repack(weight, source, expert=expert, report=report.data_ptr(), stream=stream)
    # The copy waits for the repacks, so the sources may go when this returns.
    found = abi.Report.from_buffer_copy(report.numpy(force=True).tobytes())
    library.report_status(found, weight)


def _decode_rows(resident: Resident, out: torch.Tensor, *, expert: int, row_begin: int) -> None:
    library_of(out.device).dequantize(
        resident.weight,
        out.data_ptr(),
        out_type=_OUT_TYPES[out.dtype],
        out_stride=out.shape[1],
        expert=expert,
        row_begin=row_begin,
        rows=out.shape[0],
        stream=stream_of(out.device),
    )


def _tiles(packed: Packed) -> Iterator[tuple[str, slice]]:
    """Return the rows of the last tile of each part, by the part's name."""
    begin = 0
    for name, rows in packed.parts:
        if rows:
            tile, _ = last_tile(rows, packed.codes.shape[1] * 2)
            yield name, slice(begin + tile.start, begin + tile.stop)
        begin += rows


def _check(resident: Resident, packed: Packed) -> None:
    """Compare the last tile of each part; all tiles cross to the host together."""
    tiles = list(_tiles(packed))
    _, columns = last_tile(resident.rows, resident.columns, packed.group)
    bytes_at = slice(columns.start // 2, columns.stop // 2)
    blocks_at = slice(columns.start // packed.group, columns.stop // packed.group)
    decoded: list[torch.Tensor] = []
    for _, rows in tiles:
        out = torch.empty(
            rows.stop - rows.start,
            resident.columns,
            dtype=torch.float32,
            device=packed.codes.device,
        )
        expert, row_begin = divmod(rows.start, resident.rows)
        _decode_rows(resident, out, expert=expert, row_begin=row_begin)
        decoded.append(out[:, columns])
    if not tiles:
        return
    stacked = torch.cat(decoded).numpy(force=True)
    codes = torch.cat([packed.codes[rows, bytes_at] for _, rows in tiles]).numpy(force=True)
    scales = packed.scale_bits
    scale_codes = torch.cat([scales[rows, blocks_at] for _, rows in tiles]).numpy(force=True)
    row_globals = torch.cat([packed.globals[rows] for _, rows in tiles]).numpy(force=True)
    begin = 0
    for name, rows in tiles:
        at = slice(begin, begin + rows.stop - rows.start)
        begin = at.stop
        check_tile(
            name,
            codes[at],
            scale_codes[at],
            row_globals[at],
            stacked[at],
            is_divisor=packed.divisor,
        )
