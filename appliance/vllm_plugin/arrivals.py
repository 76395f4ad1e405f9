"""Matrices that a layer holds in the compute type, whole as they arrive from the checkpoint.

E4M3 weights wait for their scales and are decoded: Volta has no FP8. Decoding before the engine
cuts a matrix lets ranks cut it anywhere, and leaves nothing to repack.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from appliance.checkpoint.stored import FP8_BLOCK
from appliance.vllm_plugin import ledger
from appliance.vllm_plugin.ranges import refuse_beyond_fp16

WEIGHT = "weight"
_SLAB = 1 << 22  # weights decoded together; bounds the FP32 values beside the result
_ON_DEVICE = 1 << 28
"""Weights of the largest matrix that is decoded on the device: a head may need more room there than
is left while the model loads."""


@dataclass(frozen=True)
class StoredMatrix:
    """One matrix as its tensors came.

    Attributes:
        name: Checkpoint name of the module, for messages.
        weight: [N, K], float8_e4m3fn where there is a scale.
        scale: One number, one for each row, or one for each 128 x 128 block; None for a matrix of
            16 or 32 bits.
        scale_name: Suffix of the scale's tensor.
    """

    name: str
    weight: torch.Tensor
    scale: torch.Tensor | None = None
    scale_name: str = ""

    def check_shape(self, rows: int, columns: int) -> None:
        """Check that the weights are what the model needs.

        Raises:
            ApplianceError: E_SHAPE.
        """
        if tuple(self.weight.shape) != (rows, columns):
            what, value = f"must have the shape {[rows, columns]}", f"{list(self.weight.shape)}"
            where, fix = f"{self.name}.{WEIGHT}", "export the checkpoint again"
            ledger.refuse("E_SHAPE", where, what, value, fix)

    def decode(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return weight times scale, [N, K] of `dtype`: nearest to the product in FP32, then cast.

        A matrix without a scale is given as it is stored.

        Raises:
            ApplianceError: E_SCALE_NAN for a weight that is no number, E_SCALE_SHAPE or
                E_GLOBAL_INVALID for scales that cannot be right, E_FP16_RANGE for a product that
                FP16 cannot hold.
        """
        if self.scale is None:
            return self.weight
        place = device if self.weight.numel() <= _ON_DEVICE else torch.device("cpu")
        weight = self.weight.to(place)
        if bool(((weight.view(torch.uint8) & ledger.NAN_CODE) == ledger.NAN_CODE).any()):
            where, fix = f"{self.name}.{WEIGHT}", "fetch the checkpoint again"
            ledger.refuse("E_SCALE_NAN", where, "FP8 weights must be numbers", "a NaN", fix)
        rows, columns = weight.shape
        scale, height = self._sound(self.scale.float(), rows, columns)
        scale = scale.to(place)
        decoded = torch.empty(rows, columns, dtype=dtype, device=place)
        step = max(1, _SLAB // max(1, columns))
        for begin in range(0, rows, step):
            end = min(rows, begin + step)
            factors = scale[torch.arange(begin, end, device=place) // height]
            if factors.shape[1] > 1:
                factors = factors.repeat_interleave(FP8_BLOCK, dim=1)[:, :columns]
            decoded[begin:end] = weight[begin:end].float() * factors
        refuse_beyond_fp16(decoded, f"{self.name}.{WEIGHT}")
        return decoded

    def _sound(self, scale: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, int]:
        """Return positive scales, one or one a block in each row, and how many rows share one."""
        where = f"{self.name}.{self.scale_name}"
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        if scale.numel() == 1:
            shape, height = (1, 1), rows
        elif tuple(scale.shape) in (blocks, (blocks[0], 1, blocks[1], 1)):
            shape, height = blocks, FP8_BLOCK
        elif tuple(scale.shape) in ((rows,), (rows, 1)):
            shape, height = (rows, 1), 1
        else:
            what = f"one number, one for each of {rows} rows, or {list(blocks)} for blocks"
            value, fix = f"shape {list(scale.shape)}", "requantize these modules"
            ledger.refuse("E_SCALE_SHAPE", where, what, value, fix)
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            what, fix = "scales must be positive numbers", "fetch or export the checkpoint again"
            ledger.refuse("E_GLOBAL_INVALID", where, what, "another", fix)
        return scale.reshape(shape), height


Parts = tuple[int, ...]


@dataclass
class Arrivals:
    """Pairs the weights of one layer with their scales, whichever comes first, if there are any.

    A tensor is known by the parts of the layer that it holds.

    Attributes:
        scale_name: Suffix of the scales' tensors, None for weights of 16 or 32 bits.
        waiting: Tensors whose other half has not come, by parts and suffix.
        came: Parts and suffix of everything that came.
        scale_bytes: Bytes of all scales that came.
    """

    scale_name: str | None
    waiting: dict[tuple[Parts, str], torch.Tensor] = field(
        default_factory=dict["tuple[Parts, str]", "torch.Tensor"]
    )
    came: set[tuple[int, str]] = field(default_factory=set["tuple[int, str]"])
    scale_bytes: int = 0

    def enter(
        self, parts: Parts, suffix: str, name: str, loaded: torch.Tensor
    ) -> StoredMatrix | None:
        """Enter one tensor; return its matrix when weight and scale are there.

        Args:
            parts: What it holds.
            suffix: `weight`, or the scales' name.
            name: Checkpoint name of the module, for messages.
            loaded: The tensor.

        Raises:
            ApplianceError: E_DUPLICATE_TENSOR if a part came before, E_CONFIG_TENSOR_MISMATCH for
                weights that are not E4M3.
        """
        is_fp8 = self.scale_name is not None
        if suffix == WEIGHT and is_fp8 != (loaded.dtype == torch.float8_e4m3fn):
            found = str(loaded.dtype).removeprefix("torch.")
            where, fix = f"{name}.{WEIGHT}", "correct the quantization config"
            said = "FP8 is expected" if is_fp8 else "weights of 16 or 32 bits are expected"
            ledger.refuse("E_CONFIG_TENSOR_MISMATCH", where, said, found, fix)
        new = {(part, suffix) for part in parts}
        if new & self.came:
            fix = "export the checkpoint again"
            ledger.refuse("E_DUPLICATE_TENSOR", f"{name}.{suffix}", "each once", "twice", fix)
        self.came |= new
        if self.scale_name is None:
            return StoredMatrix(name, loaded)
        self.scale_bytes += 0 if suffix == WEIGHT else loaded.nbytes
        half = self.waiting.pop((parts, self.scale_name if suffix == WEIGHT else WEIGHT), None)
        if half is None:
            self.waiting[parts, suffix] = loaded
            return None
        weight, scale = (loaded, half) if suffix == WEIGHT else (half, loaded)
        return StoredMatrix(name, weight, scale, self.scale_name)

    def check_part(self, part: int, name: str) -> None:
        """Check that weight, and scale if there is one, of a part came.

        Raises:
            ApplianceError: E_MISSING_TENSOR or E_MISSING_COMPANION with the tensor that did not.
        """
        halves = (WEIGHT,) if self.scale_name is None else (WEIGHT, self.scale_name)
        missing = [suffix for suffix in halves if (part, suffix) not in self.came]
        if missing:
            code = "E_MISSING_TENSOR" if missing == list(halves) else "E_MISSING_COMPANION"
            what, fix = "every matrix needs it", "fetch or export the checkpoint again"
            ledger.refuse(code, f"{name}.{missing[0]}", what, "no tensor", fix)
