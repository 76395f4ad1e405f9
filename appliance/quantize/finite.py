"""Looks at every tensor of the source before the first byte of the output: NaN spoils a model.

One NaN in a norm or a bias makes every answer NaN, and nothing later would refuse it. Damage is the
usual reason, so all of it is named at once, not after an hour in the last file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.checkpoint.faults import FaultList
from appliance.quantize.native import DTYPES, scan

if TYPE_CHECKING:
    from appliance.checkpoint.tensors import TensorReader
    from appliance.quantize.layout import Layout


def require_finite(
    reader: TensorReader, layout: Layout, *, threads: int, is_dense_free: bool
) -> None:
    """Refuse a source with NaN or infinite values.

    Args:
        reader: The opened source.
        layout: What becomes of its tensors.
        threads: Threads that look.
        is_dense_free: Tensors that stay dense may hold anything: the user said so.

    Raises:
        ApplianceError: QUANT_NOT_FINITE, exit 31, with every such tensor.
    """
    faults = FaultList()
    for shard, items in layout.shards.items():
        quantized = {item.entry.name for item in items if item.site is not None}
        for entry in {item.entry.name: item.entry for item in items}.values():
            is_free = is_dense_free and entry.name not in quantized
            if is_free or entry.dtype not in DTYPES:
                continue
            found = scan(reader.array(entry.name), entry.dtype, threads=threads)
            reader.release(entry.name)
            if found.non_finite:
                fix = "download the checkpoint again or use another one"
                if entry.name not in quantized:
                    fix = "download the checkpoint again, or copy it as it is (--allow-not-finite)"
                faults.add(
                    "QUANT_NOT_FINITE",
                    f"{reader.root / shard} {entry.name}",
                    "every weight is finite",
                    f"{found.non_finite} NaN or infinite of {entry.elements}",
                    fix,
                )
    faults.raise_if_any(str(reader.root))
