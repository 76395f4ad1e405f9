"""What scales and globals may hold: the checks that every path from bytes to weights goes through.

A value that fails here must never reach a kernel: NaN and a wrong direction give no error there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from appliance.checkpoint.faults import refuse
from appliance.nvfp4 import e2m1, e4m3, mxfp4

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from appliance.errors import ApplianceError

LARGEST_WEIGHT: Final = 1e3
"""Largest believable |weight|. A global used in the wrong direction gives 1e5 and more."""

_SIGN: Final = 0x80
_MAGNITUDE: Final = 0x7F
_SIGNLESS_CODES: Final = 0x77  # two E2M1 codes a byte, their signs left out
_FIRST_BYTES: Final = 4096
_REFETCH: Final = "fetch the checkpoint again; no kernel may see this value"


@dataclass(frozen=True)
class ScaleFacts:
    """What a tensor of block scales holds.

    Attributes:
        largest: Largest finite scale, 0 if there is none.
        first_nan: Coordinates of the first NaN or infinity.
        first_negative: Coordinates of the first scale with its sign bit set.
        all_nan: No scale is a number.
    """

    largest: float = 0.0
    first_nan: tuple[int, ...] | None = None
    first_negative: tuple[int, ...] | None = None
    all_nan: bool = False


def scale_facts(scales: NDArray[Any]) -> ScaleFacts:
    """Look at block scales once.

    Args:
        scales: E4M3 bits (uint8), float16 or float32, any shape.
    """
    if scales.dtype == np.uint8:
        magnitudes = scales & _MAGNITUDE
        is_bad: NDArray[np.bool_] = magnitudes == _MAGNITUDE
        is_negative = (scales & _SIGN) != 0
        finite = magnitudes[~is_bad]
        largest = float(e4m3.VALUES[int(finite.max(initial=0))])
    else:
        is_bad = ~np.isfinite(scales)
        is_negative = np.signbit(scales)
        largest = float(np.abs(scales[~is_bad]).max(initial=0))
    return ScaleFacts(
        largest=largest,
        first_nan=_first(is_bad),
        first_negative=_first(is_negative & ~is_bad),
        all_nan=bool(scales.size) and bool(is_bad.all()),
    )


def check_values(
    module: str,
    facts: ScaleFacts,
    factor: float | None,
    *,
    scales: str,
    globals_: str,
    divisor: bool,
    no_codes: bool = False,
) -> bool:
    """Check block scales and global of one matrix.

    Args:
        module: Name of the matrix in the checkpoint.
        facts: What its block scales hold.
        factor: Its global as stored; None if the layout has none.
        scales: Name of the tensor of block scales, for messages.
        globals_: Name of the tensor of the global, for messages.
        divisor: The global divides; else it multiplies.
        no_codes: Every code is a zero, so that a global of zero loses nothing.

    Returns:
        True if the matrix is all zero: ModelOpt writes a global of 0 with NaN or zero scales.

    Raises:
        ApplianceError: E_SCALE_NAN, E_SCALE_NEGATIVE, E_GLOBAL_INVALID or E_GLOBAL_DIRECTION.
    """
    if factor == 0.0 and not divisor and (no_codes or _is_dead(facts)):
        return True
    _check_scales(f"{module}.{scales}", facts)
    if factor is None:
        multiplier = 1.0
    elif not (math.isfinite(factor) and factor > 0.0):
        raise _global_invalid(f"{module}.{globals_}", factor)
    else:
        multiplier = 1.0 / factor if divisor else factor
    largest = e2m1.MAXIMUM * facts.largest * multiplier
    if not largest <= LARGEST_WEIGHT:
        raise _too_large(module, largest, factor, scales, globals_, divisor=divisor)
    return False


def check_largest(scales: str, largest: float) -> None:
    """Check the largest weight of a matrix whose scales have no global.

    Args:
        scales: Full name of the tensor of scales, for messages.
        largest: Magnitude of the largest weight.

    Raises:
        ApplianceError: E_GLOBAL_DIRECTION.
    """
    if not largest <= LARGEST_WEIGHT:
        limit, fix = f"the largest weight must be at most {LARGEST_WEIGHT:g}", "export it again"
        raise refuse("E_GLOBAL_DIRECTION", scales, limit, f"{largest:.3g}", fix)


def check_powers(where: str, scales: NDArray[np.uint8]) -> None:
    """Check the E8M0 scales of one matrix.

    Args:
        where: Full name of the tensor of scales, for messages.
        scales: Their bits, of which 0xFF is no number.

    Raises:
        ApplianceError: E_SCALE_NAN or E_GLOBAL_DIRECTION.
    """
    _check_scales(where, ScaleFacts(first_nan=_first(scales == mxfp4.NAN)))
    largest = float(mxfp4.decode_scales(scales.max(initial=0)))
    check_largest(where, e2m1.MAXIMUM * largest)


def check_fp8(module: str, codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> None:
    """Check E4M3 weights and their scales.

    Raises:
        ApplianceError: E_SCALE_NAN for a weight that is no number, E_GLOBAL_INVALID for a scale
            that is not positive and finite.
    """
    bad = _first((codes & _MAGNITUDE) == _MAGNITUDE)
    if bad is not None:
        what, value = "FP8 weights must be numbers", f"a NaN at {place(bad, 'column')}"
        raise refuse("E_SCALE_NAN", f"{module}.weight", what, value, _REFETCH)
    wrong = ~(np.isfinite(scales) & (scales > 0))
    if wrong.any():
        value = repr(float(scales[wrong].flat[0]))
        raise _global_invalid(f"{module}.weight_scale", value)


def place(coordinates: tuple[int, ...], last: str = "block") -> str:
    """Return coordinates as messages name them: `expert 3, row 7, block 2`."""
    axes = ("expert", "row", last)[-len(coordinates) :]
    return ", ".join(f"{axis} {at}" for axis, at in zip(axes, coordinates, strict=False))


def has_codes(codes: NDArray[np.uint8]) -> bool:
    """Tell whether packed codes stand for anything but zeros; the first bytes nearly always do."""
    flat = codes.reshape(-1)
    start = flat[:_FIRST_BYTES] & _SIGNLESS_CODES
    return bool(start.any()) or bool((flat & _SIGNLESS_CODES).any())


def _is_dead(facts: ScaleFacts) -> bool:
    """Tell whether nothing is lost by a multiplier of zero."""
    return facts.all_nan or (facts.largest == 0.0 and facts.first_nan is None)


def _check_scales(where: str, facts: ScaleFacts) -> None:
    if facts.first_nan is not None:
        value = f"NaN at {place(facts.first_nan)}"
        raise refuse("E_SCALE_NAN", where, "block scales must be numbers", value, _REFETCH)
    if facts.first_negative is not None:
        what, value = "block scales must not be negative", place(facts.first_negative)
        raise refuse("E_SCALE_NEGATIVE", where, what, f"a sign bit at {value}", _REFETCH)


def _global_invalid(where: str, value: float | str) -> ApplianceError:
    what, fix = "must be a positive finite number", "fetch or export the checkpoint again"
    return refuse("E_GLOBAL_INVALID", where, what, str(value), fix)


def _too_large(
    module: str, largest: float, factor: float | None, scales: str, globals_: str, *, divisor: bool
) -> ApplianceError:
    limit = f"the largest weight must be at most {LARGEST_WEIGHT:g}"
    if factor is None:
        where, value = f"{module}.{scales}", f"{largest:.3g}"
        return refuse("E_GLOBAL_DIRECTION", where, limit, value, "export it again")
    role = "divides" if divisor else "multiplies"
    return refuse(
        "E_GLOBAL_DIRECTION",
        f"{module}.{globals_}",
        f"{role}, so {limit}",
        f"{largest:.3g} from a global of {factor:.6g}",
        "its producer stored the reciprocal; export it again",
    )


def _first(mask: NDArray[np.bool_]) -> tuple[int, ...] | None:
    if not mask.any():
        return None
    return tuple(int(index) for index in np.unravel_index(int(mask.argmax()), mask.shape))
