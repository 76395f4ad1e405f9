"""Faults of a checkpoint, gathered so that one run names them all."""

from __future__ import annotations

from dataclasses import dataclass, field

from appliance.errors import ApplianceError, ExitCode, Fault

SHOWN_PER_CODE = 12
"""A broken export repeats one fault thousands of times; more lines of one code say nothing new."""

CORRUPT = frozenset(
    {
        "E_TRUNCATED",
        "E_TRAILING",
        "E_BAD_HEADER",
        "E_LFS_POINTER",
        "E_DIGEST",
        "E_DIR_CRC",
        "E_HEADER_CRC",
        "E_LEGACY_SIZE",
        "E_PAYLOAD_CRC",
        "QUANT_NOT_FINITE",
    }
)
"""Codes whose files must be fetched again (exit 31); all others need another checkpoint (30)."""


@dataclass
class FaultList:
    """Faults of one phase in the order they were found."""

    faults: list[Fault] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, code: str, where: str, what: str, value: str, fix: str) -> None:
        """Add one fault; repeats of a code beyond `SHOWN_PER_CODE` are only counted."""
        seen = self.counts.get(code, 0) + 1
        self.counts[code] = seen
        if seen <= SHOWN_PER_CODE:
            self.faults.append(Fault(code, where, what, value, fix))

    def raise_if_any(self, root: str) -> None:
        """Stop with every fault found so far.

        Raises:
            ApplianceError: Exit 31 if a file is corrupt, else 30.
        """
        if not self.faults:
            return
        shown = list(self.faults)
        for code, count in self.counts.items():
            if count > SHOWN_PER_CODE:
                what = f"{count} faults of this kind, the first {SHOWN_PER_CODE} are listed"
                shown.append(Fault(code, root, what, str(count), "repair the listed ones first"))
        corrupt = any(code in CORRUPT for code in self.counts)
        exit_code = ExitCode.CHECKPOINT_CORRUPT if corrupt else ExitCode.CHECKPOINT_UNSUPPORTED
        raise ApplianceError(exit_code, *shown)


def refuse(code: str, where: str, what: str, value: str, fix: str) -> ApplianceError:
    """Return the error of one fault that makes reading on pointless."""
    faults = FaultList()
    faults.add(code, where, what, value, fix)
    exit_code = ExitCode.CHECKPOINT_CORRUPT if code in CORRUPT else ExitCode.CHECKPOINT_UNSUPPORTED
    return ApplianceError(exit_code, *faults.faults)
