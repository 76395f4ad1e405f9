"""The one-time decoding of a layer's weights, checked by the oracle, and its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.vllm_plugin import ops, resident
from appliance.vllm_plugin.spotcheck import check_tile, last_tile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.vllm_plugin.canonical import Packed
    from appliance.vllm_plugin.compat import Layer


def dequantize_checked(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Decode every weight once, where it lies, and compare tiles with the numpy oracle.

    Returns:
        [N, K] of `dtype`: the FP32 value nearest to the exact one, rounded once more for FP16 and
        BF16.

    Raises:
        ApplianceError: E_SELF_TEST if a tile differs.
    """
    decoded = torch.float32 if dtype == torch.bfloat16 else dtype
    if packed.codes.is_cuda:
        return resident.decode(packed, decoded).to(dtype)
    weight = ops.decode(packed.codes, packed.scales, packed.globals, packed.divisor, decoded)
    begin = 0
    for name, rows in packed.parts:
        if rows:
            _check_part(packed, weight, name, begin, rows)
        begin += rows
    return weight.to(dtype)


def _check_part(packed: Packed, weight: torch.Tensor, name: str, begin: int, rows: int) -> None:
    tile_rows, columns = last_tile(rows, weight.shape[1], packed.group)
    at = slice(begin + tile_rows.start, begin + tile_rows.stop)
    bytes_at = slice(columns.start // 2, columns.stop // 2)
    blocks_at = slice(columns.start // packed.group, columns.stop // packed.group)
    check_tile(
        name,
        packed.codes[at, bytes_at].numpy(force=True),
        packed.scale_bits[at, blocks_at].numpy(force=True),
        packed.globals[at].numpy(force=True),
        weight[at, columns].numpy(force=True),
        is_divisor=packed.divisor,
    )


def parameter(data: torch.Tensor, **attributes: object) -> torch.nn.Parameter:
    """Return a plain parameter with the attributes that the engine's loaders look for."""
    made = torch.nn.Parameter(data, requires_grad=False)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def dropped(*_: object, return_success: bool = False, **__: object) -> bool | None:
    """Load an activation scale by forgetting it: weight-only products read none."""
    return True if return_success else None


def drop_parameters(layer: Layer, names: Iterable[str]) -> None:
    """Free parameters that nothing reads after loading."""
    for name in names:
        delattr(layer, name)


def set_plain(layer: Layer, name: str, data: torch.Tensor) -> None:
    """Register a plain parameter: graphs and compilers know nothing of loading classes."""
    layer.register_parameter(name, parameter(data))
