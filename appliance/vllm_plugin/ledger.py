"""What was loaded for each matrix, checked on the whole tensor before any rank cuts it.

vLLM checks the completeness of quantized checkpoints nowhere: a missing scale stays whatever memory
held. So every tensor that arrives is entered here, and after loading each matrix must be whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from appliance.checkpoint import values
from appliance.checkpoint.metadata import NVFP4_GROUP
from appliance.checkpoint.values import ScaleFacts, place, scale_facts
from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from appliance.vllm_plugin.inventory import Names

NAN_CODE = 0x7F  # E4M3 without its sign bit; also the sentinel of scales not loaded yet

SCALE_TYPES = {"F8_E4M3": torch.float8_e4m3fn, "F16": torch.float16, "F32": torch.float32}
"""Types of block scales, by the names of headers."""


@dataclass
class MatrixRecord:
    """What was loaded of one matrix as the checkpoint stores it.

    Attributes:
        codes: How often its packed codes arrived.
        scales: How often its block scales arrived.
        globals: Every global that arrived.
        facts: What its block scales hold.
        has_codes: A code stands for anything but zero.
    """

    codes: int = 0
    scales: int = 0
    globals: list[float] = field(default_factory=list)
    facts: ScaleFacts = field(default_factory=ScaleFacts)
    has_codes: bool = False

    def merge(self, other: MatrixRecord) -> None:
        """Add what another tensor of the same matrix brought."""
        self.codes += other.codes
        self.scales += other.scales
        self.globals += other.globals
        self.has_codes |= other.has_codes
        mine, theirs = self.facts, other.facts
        self.facts = ScaleFacts(
            largest=max(mine.largest, theirs.largest),
            first_nan=mine.first_nan or theirs.first_nan,
            first_negative=mine.first_negative or theirs.first_negative,
            all_nan=mine.all_nan or theirs.all_nan,
        )


@dataclass(frozen=True)
class Matrix:
    """One matrix as the checkpoint must hold it: its name, and rows and columns before any cut."""

    name: str
    rows: int
    columns: int

    @property
    def stored_columns(self) -> int:
        """Columns with the padding that ModelOpt adds to reach a multiple of a block."""
        return -(-self.columns // NVFP4_GROUP) * NVFP4_GROUP


def enter_codes(record: MatrixRecord, matrix: Matrix, names: Names, loaded: torch.Tensor) -> None:
    """Check dtype and shape of packed codes and enter them.

    Raises:
        ApplianceError: E_UNQUANTIZED_NOT_EXCLUDED for a dense weight, E_SHAPE for any other size.
    """
    where = f"{matrix.name}.{names.codes}"
    columns = matrix.stored_columns // (8 if names.has_words else 2)
    if loaded.is_floating_point():
        refuse(
            "E_UNQUANTIZED_NOT_EXCLUDED",
            where,
            "the config says NVFP4",
            f"a dense {_describe(loaded)}",
            f"add {matrix.name} to the exclude list of the config",
        )
    _check_shape("E_SHAPE", where, (matrix.rows, columns), loaded)
    record.codes += 1
    record.has_codes = values.has_codes(loaded.view(torch.uint8).numpy(force=True))


def enter_scales(record: MatrixRecord, matrix: Matrix, names: Names, loaded: torch.Tensor) -> None:
    """Check dtype and shape of block scales, note what is wrong with their values, and enter them.

    Raises:
        ApplianceError: E_SCALE_DTYPE or E_SCALE_SHAPE.
    """
    where = f"{matrix.name}.{names.scales}"
    if loaded.dtype != SCALE_TYPES[names.scale_dtype]:
        refuse(
            "E_SCALE_DTYPE",
            where,
            f"block scales must be {names.scale_dtype}",
            _describe(loaded),
            "requantize it",
        )
    _check_shape(
        "E_SCALE_SHAPE", where, (matrix.rows, matrix.stored_columns // names.group), loaded
    )
    record.scales += 1
    record.facts = scale_facts(as_array(loaded))


def enter_global(record: MatrixRecord, matrix: Matrix, names: Names, loaded: torch.Tensor) -> None:
    """Enter the global scale of one matrix, as stored.

    Raises:
        ApplianceError: E_SHAPE if it is not one number.
    """
    where = f"{matrix.name}.{names.globals}"
    if loaded.numel() != 1:
        refuse("E_SHAPE", where, "one global scale a matrix", _describe(loaded), "export it again")
    record.globals.append(float(loaded.reshape(()).float()))


def unwritten_scales(*shape: int, scale_dtype: str = "F8_E4M3") -> torch.Tensor:
    """Return block scales that are NaN until loaded, so that none can pass for a weight's."""
    if scale_dtype == "F8_E4M3":
        return torch.full(shape, NAN_CODE, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return torch.full(shape, torch.nan, dtype=SCALE_TYPES[scale_dtype])


def as_array(scales: torch.Tensor) -> NDArray[Any]:
    """Return block scales for numpy, which has no E4M3: those as their bits."""
    is_narrow = scales.dtype == torch.float8_e4m3fn
    array: NDArray[Any] = (scales.view(torch.uint8) if is_narrow else scales).numpy(force=True)
    return array


def clear(scales: torch.Tensor) -> None:
    """Set block scales to zero, in place."""
    (scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales).zero_()


def check(record: MatrixRecord, matrix: Matrix, names: Names) -> bool:
    """Check that one matrix is whole and its values are sound.

    Returns:
        True if the matrix is all zero: ModelOpt writes a global of 0 with NaN or zero scales.

    Raises:
        ApplianceError: If a tensor is missing, came twice, or has values that no kernel may see.
    """
    check_whole(record, matrix, names)
    return check_values(record, matrix, names)


def check_whole(record: MatrixRecord, matrix: Matrix, names: Names) -> None:
    """Check that codes, scales and global arrived exactly once.

    Raises:
        ApplianceError: E_MISSING_TENSOR, E_MISSING_COMPANION or E_DUPLICATE_TENSOR.
    """
    counts = {
        names.codes: record.codes,
        names.scales: record.scales,
        names.globals: len(record.globals) if names.has_global else 1,
    }
    for suffix, count in counts.items():
        if count == 1:
            continue
        where = f"{matrix.name}.{suffix}"
        if count > 1:
            refuse(
                "E_DUPLICATE_TENSOR", where, "each tensor once", f"{count} times", "export it again"
            )
        came = record.codes or record.scales or record.globals
        code = "E_MISSING_COMPANION" if came else "E_MISSING_TENSOR"
        fix = "fetch it again, or add the module to the exclude list of the config"
        refuse(code, where, "every NVFP4 matrix needs it", "no tensor", fix)


def check_values(record: MatrixRecord, matrix: Matrix, names: Names) -> bool:
    """Check the values of scales and global.

    Returns:
        True if the matrix is all zero: ModelOpt writes a global of 0 with NaN or zero scales.

    Raises:
        ApplianceError: E_SCALE_NAN, E_SCALE_NEGATIVE, E_GLOBAL_INVALID or E_GLOBAL_DIRECTION.
    """
    return values.check_values(
        matrix.name,
        record.facts,
        record.globals[0] if names.has_global else None,
        scales=names.scales,
        globals_=names.globals,
        divisor=names.divisor,
        no_codes=not record.has_codes,
    )


def check_no_sentinel(scales: torch.Tensor, name: str, names: Names) -> None:
    """Check that every block scale of the loaded layer was written.

    Raises:
        ApplianceError: E_MISSING_COMPANION with the first coordinate that was not.
    """
    unwritten = scale_facts(as_array(scales)).first_nan
    if unwritten is not None:
        where = f"{name}.{names.scales}"
        what = "every block scale must be loaded"
        fix = "fetch or export the checkpoint again"
        refuse("E_MISSING_COMPANION", where, what, f"none at {place(unwritten)}", fix)


def refuse(code: str, where: str, what: str, value: str, fix: str) -> NoReturn:
    """Stop loading with one fault of the checkpoint (exit code 30)."""
    raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, Fault(code, where, what, value, fix))


def _check_shape(code: str, where: str, expected: Sequence[int], loaded: torch.Tensor) -> None:
    if tuple(loaded.shape) != tuple(expected):
        refuse(
            code,
            where,
            f"must have the shape {list(expected)}",
            _describe(loaded),
            "requantize the model",
        )


def _describe(loaded: torch.Tensor) -> str:
    return f"{str(loaded.dtype).removeprefix('torch.')} {list(loaded.shape)}"
