"""How weights are encoded, with the defaults of each mode."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from appliance.quantize.scheme import NVFP4, QUASAR_G128, Scheme

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Method(StrEnum):
    """What `--mode` names."""

    FAST = "fast"  # the best E4M3 code of 17 around amax / 6
    RTN = "rtn"  # the E4M3 code nearest to amax / 6
    CALIBRATED = "calibrated"  # by the activations of a text: weighted sweep, then GPTQ
    QUASAR = "quasar-g128"  # E2M1 with one FP16 scale for 128 weights


ERROR_LIMITS: Mapping[Method, float] = {
    Method.FAST: 8.0e-3,
    Method.RTN: 9.5e-3,
    Method.CALIBRATED: 6.0e-2,
    Method.QUASAR: 1.8e-2,
}
"""Largest relative squared error of one matrix. Weights of trained layers give 6.6e-3 to 7.3e-3
(fast), 8.3e-3 to 9.1e-3 (rtn) and 1.04e-2 to 1.57e-2 (quasar-g128); calibrated trades this error
for that of the output and is judged by the latter too. More means that a matrix is not what it
seems."""


@dataclass(frozen=True)
class Calibration:
    """Where activations come from.

    Attributes:
        text: UTF-8 text file.
        tokens: Most tokens to run, held-out ones included.
    """

    text: Path
    tokens: int


@dataclass(frozen=True)
class Settings:
    """How weights are encoded.

    Attributes:
        mode: How scales and codes are chosen.
        threads: Threads of the encoder.
        error_limit: Largest relative squared error of one matrix.
        calibration: Where activations come from, in mode `calibrated`.
        allow_not_finite: NaN and infinity in tensors that stay dense are copied.
    """

    mode: Method
    threads: int
    error_limit: float
    calibration: Calibration | None = None
    allow_not_finite: bool = False

    @property
    def scheme(self) -> Scheme:
        """What the mode stores a matrix as."""
        return QUASAR_G128 if self.mode is Method.QUASAR else NVFP4


def settings_of(
    mode: str,
    *,
    threads: int,
    error_limit: float | None = None,
    calibration: Calibration | None = None,
    allow_not_finite: bool = False,
) -> Settings:
    """Complete what the user asked for with the mode's default limit."""
    chosen = Method(mode)
    limit = ERROR_LIMITS[chosen] if error_limit is None else error_limit
    return Settings(chosen, threads, limit, calibration, allow_not_finite)
