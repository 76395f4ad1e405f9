"""Whether FP16 holds what a checkpoint stores wider, seen while the tensors pass to the engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from appliance.checkpoint.linears import PARTS
from appliance.checkpoint.stored import split_name
from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from numpy.typing import NDArray

_LOG = logging.getLogger("vllm.nvfp4")

FP16_MAX = 65504.0
FLUSHED = 2.0**-25
"""Magnitudes up to this become 0 in FP16: half of its smallest number, and ties go to even."""

MANY = 0.01
"""Share of a tensor's weights that may become 0 without a word."""

_FIX = "serve it with execution.device: cpu, which computes in float32, or serve another checkpoint"
_CHUNK = 1 << 18  # elements; stays in a core's cache
_NAMED = 4  # faults of one start


@dataclass(frozen=True)
class Extent:
    """How the values of one tensor lie in the range of FP16.

    Attributes:
        too_large: Values beyond 65504, infinities included.
        worst: The largest of them in magnitude, 0 without.
        place: Where it lies.
        flushed: Values that become 0 and are not.
        count: Values.
    """

    too_large: int
    worst: float
    place: tuple[int, ...]
    flushed: int
    count: int


def extent(stored: torch.Tensor) -> Extent:
    """Return how the values of a BF16 or FP32 tensor lie in the range of FP16.

    Magnitudes are compared as bits, which order like the numbers they stand for.
    """
    is_half = stored.dtype == torch.bfloat16
    kind, cut = (np.uint16, 16) if is_half else (np.uint32, 0)
    flat = stored.reshape(-1).view(torch.int16 if is_half else torch.int32)
    bits: NDArray[Any] = flat.numpy(force=True).view(kind)
    sign, limit, small, infinite = (
        kind(int(np.uint32(whole)) >> cut)
        for whole in (
            0x7FFF_FFFF,
            np.float32(FP16_MAX).view(np.uint32),
            np.float32(FLUSHED).view(np.uint32),
            np.float32(np.inf).view(np.uint32),
        )
    )
    too_large, worst, at, flushed = 0, 0, 0, 0
    for begin in range(0, bits.size, _CHUNK):
        magnitudes: NDArray[Any] = bits[begin : begin + _CHUNK] & sign
        if int(magnitudes.max()) > limit:
            magnitudes[magnitudes > infinite] = 0  # NaN is no matter of range
            too_large += int(np.count_nonzero(magnitudes > limit))
            first = int(magnitudes.argmax())
            if int(magnitudes[first]) > max(worst, int(limit)):
                worst, at = int(magnitudes[first]), begin + first
        magnitudes -= kind(1)  # zeros wrap around to the largest number
        flushed += int(np.count_nonzero(magnitudes < small))
    value = float(stored.reshape(-1)[at]) if too_large else 0.0
    place = tuple(int(i) for i in np.unravel_index(at, stored.shape)) if too_large else ()
    return Extent(too_large, value, place, flushed, bits.size)


class RangeWatch:
    """Looks at every tensor on its way into one model, and judges when all have arrived.

    What the model itself holds in more than FP16, such as the decay of a gated delta network, may
    have any value; so may quantized weights and their scales, which have checks of their own.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Learn what the model holds in FP16, by the names of its parameters."""
        self._parameters = [(name, held) for name, held in parameters if held.numel()]
        narrow = {_tail(n) for n, held in self._parameters if held.dtype == torch.float16}
        wide = {_tail(n) for n, held in self._parameters if held.dtype != torch.float16}
        self._exempt = wide - narrow
        self._is_needed = bool(narrow)
        self._too_large: list[tuple[str, Extent]] = []
        self._flushed: list[tuple[float, str]] = []

    def over(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Give every tensor on, after a look at those that FP16 might not hold."""
        for name, stored in tensors:
            if self._is_needed and stored.numel() and self._concerns(name, stored):
                self._note(name, extent(stored))
            yield name, stored

    def _concerns(self, name: str, stored: torch.Tensor) -> bool:
        if stored.dtype not in (torch.bfloat16, torch.float32) or _tail(name) in self._exempt:
            return False
        _, part = split_name(name)
        return part == "weight" or part not in PARTS

    def _note(self, name: str, found: Extent) -> None:
        if found.too_large:
            self._too_large.append((name, found))
        if found.flushed >= MANY * found.count:
            self._flushed.append((found.flushed / found.count, name))

    def finish(self) -> None:
        """Refuse what FP16 could not hold, and say which tensor lost most small values.

        Tensors that this rank has no use for, such as another stage's or a drafter's, do no harm.

        Raises:
            ApplianceError: E_FP16_RANGE with name, value and place of each such tensor.
        """
        if self._too_large and any(_is_full(held) for _, held in self._parameters):
            faults = (_fault(name, found) for name, found in self._too_large[:_NAMED])
            raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, *faults)
        if self._flushed:
            share, name = max(self._flushed)
            _LOG.warning(
                "nvfp4.flushed code=W_FP16_FLUSHED name=%s share=%.4f tensors=%d",
                name,
                share,
                len(self._flushed),
            )


def _fault(name: str, found: Extent) -> Fault:
    what = f"weights must be at most {FP16_MAX:.0f} for float16"
    others = f", one of {found.too_large} beyond it" if found.too_large > 1 else ""
    value = f"{found.worst:.7g} at {list(found.place)}{others}"
    return Fault("E_FP16_RANGE", name, what, value, _FIX)


def _is_full(held: torch.Tensor) -> bool:
    """Tell whether FP16 weights are at the end of their range, or beyond."""
    if held.dtype != torch.float16:
        return False
    low, high = torch.aminmax(held)
    return not (float(high) < FP16_MAX and float(low) > -FP16_MAX)


def _tail(name: str) -> str:
    """Return the last two components of a name: engines rename what comes before."""
    return ".".join(name.rsplit(".", 2)[-2:])


def refuse_beyond_fp16(weight: torch.Tensor, name: str) -> None:
    """Refuse FP16 weights of which one is infinite: its value was beyond the range.

    Raises:
        ApplianceError: E_FP16_RANGE.
    """
    if weight.dtype != torch.float16:
        return
    found = torch.isinf(weight).nonzero()
    if len(found):
        what = f"weights must be at most {FP16_MAX:.0f} for float16"
        value = f"a larger one at {[int(at) for at in found[0]]}"
        fault = Fault("E_FP16_RANGE", name, what, value, _FIX)
        raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault)
