"""What a run made: errors per tensor, kept shard by shard so that a resumed run has them all."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from appliance.checkpoint.writer import write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True)
class TensorResult:
    """One quantized matrix.

    Attributes:
        name: Module name.
        shape: [N, K].
        site: Fused site whose global scale it shares.
        divisor: That global scale: weight = e2m1 * e4m3 / divisor.
        squared_error: Sum of (weight - dequantized)^2.
        squared_weight: Sum of weight^2.
        output_error: Relative squared error of the layer's output on held-out text, if there is
            a calibration.
        output_error_rtn: The same had the matrix been rounded to nearest.
    """

    name: str
    shape: tuple[int, int]
    site: str
    divisor: float
    squared_error: float
    squared_weight: float
    output_error: float | None = None
    output_error_rtn: float | None = None

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.shape[0] * self.shape[1]

    @property
    def relative_mse(self) -> float:
        """Squared error relative to the squared weights; 0 for an all-zero matrix."""
        return self.squared_error / self.squared_weight if self.squared_weight else 0.0


@dataclass(frozen=True)
class ShardResult:
    """One finished output file.

    Attributes:
        shard: File name.
        seconds: Wall time it took.
        tensors: Its quantized matrices.
        notes: Warnings, each with its code first.
    """

    shard: str
    seconds: float
    tensors: tuple[TensorResult, ...]
    notes: tuple[str, ...]

    @property
    def weights(self) -> int:
        """Number of quantized weights."""
        return sum(tensor.weights for tensor in self.tensors)

    @property
    def relative_mse(self) -> float:
        """Relative squared error over all its matrices."""
        return relative_mse(self.tensors)


def relative_mse(tensors: Sequence[TensorResult]) -> float:
    """Summed squared error relative to the summed squared weights; 0 if there is nothing."""
    energy = sum(tensor.squared_weight for tensor in tensors)
    return sum(tensor.squared_error for tensor in tensors) / energy if energy else 0.0


def save_shard(path: Path, result: ShardResult) -> None:
    """Write a shard's result whole or not at all; its presence says that the shard is finished."""
    write_json(path, asdict(result))


def load_shard(path: Path) -> ShardResult | None:
    """Read a shard's result back, or None if there is none."""
    try:
        stored: dict[str, Any] = json.loads(path.read_bytes())
        tensors = tuple(tensor_result(tensor) for tensor in stored["tensors"])
        return ShardResult(
            stored["shard"], float(stored["seconds"]), tensors, tuple(stored["notes"])
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def tensor_result(stored: dict[str, Any]) -> TensorResult:
    """Read one matrix's result back.

    Raises:
        KeyError, TypeError, ValueError: If a part is missing or of another kind.
    """
    rows, columns = stored["shape"]
    return TensorResult(
        name=str(stored["name"]),
        shape=(int(rows), int(columns)),
        site=str(stored["site"]),
        divisor=float(stored["divisor"]),
        squared_error=float(stored["squared_error"]),
        squared_weight=float(stored["squared_weight"]),
        output_error=_number_or_none(stored.get("output_error")),
        output_error_rtn=_number_or_none(stored.get("output_error_rtn")),
    )


def _number_or_none(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def make_report(
    job: Mapping[str, Any],
    results: Sequence[ShardResult],
    *,
    error_limit: float,
    before_s: float = 0.0,
) -> dict[str, Any]:
    """Build quantize_report.json of all shards.

    Args:
        job: The job's identity.
        results: Every shard's result.
        error_limit: Largest relative squared error that was allowed.
        before_s: Seconds of this run before the first file.
    """
    tensors = [tensor for result in results for tensor in result.tensors]
    weights = sum(tensor.weights for tensor in tensors)
    seconds = before_s + sum(result.seconds for result in results)
    return {
        "version": job["version"],
        "mode": job["mode"],
        "weights": weights,
        "seconds": round(seconds, 3),
        "weights_per_s": round(weights / seconds) if seconds else 0,
        "relative_mse": relative_mse(tensors),
        "error_limit": error_limit,
        "notes": [note for result in results for note in result.notes],
        "job": dict(job),
        **_output_errors(tensors),
        "tensors": {tensor.name: _described(tensor) for tensor in tensors},
    }


def _output_errors(tensors: Sequence[TensorResult]) -> dict[str, Any]:
    """Mean over the matrices of the held-out output error, and of round to nearest beside it."""
    ours = [tensor.output_error for tensor in tensors if tensor.output_error is not None]
    theirs = [tensor.output_error_rtn for tensor in tensors if tensor.output_error_rtn is not None]
    if not ours or not theirs:
        return {}
    mean, mean_rtn = sum(ours) / len(ours), sum(theirs) / len(theirs)
    gain = 1.0 - mean / mean_rtn if mean_rtn else 0.0
    return {"output_error": mean, "output_error_rtn": mean_rtn, "below_rtn": gain}


def _described(tensor: TensorResult) -> dict[str, Any]:
    described: dict[str, Any] = {
        "shape": list(tensor.shape),
        "site": tensor.site,
        "weight_global_scale": tensor.divisor,
        "relative_mse": tensor.relative_mse,
    }
    if tensor.output_error is not None:
        described["output_error"] = tensor.output_error
        described["output_error_rtn"] = tensor.output_error_rtn
    return described
