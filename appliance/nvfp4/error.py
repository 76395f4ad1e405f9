"""What goes wrong with a kernel library, as the appliance's errors."""

from __future__ import annotations

from typing import Final

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.nvfp4 import abi

_STATUSES: Final = {int(status): status for status in abi.Status}
_BAD_DATA: Final = frozenset(
    {abi.Status.ESCALE_NAN, abi.Status.ESCALE_NEGATIVE, abi.Status.EGLOBAL}
)
_DEVICE: Final = frozenset({abi.Status.EDEVICE, abi.Status.ESELFTEST})


class LibraryError(ApplianceError):
    """A kernel library is missing, has another ABI, or refused a call.

    Attributes:
        status: The refused call's status; None if there was no call.
    """

    def __init__(self, exit_code: ExitCode, fault: Fault, status: abi.Status | None = None) -> None:
        """Keep the one fault and the status."""
        super().__init__(exit_code, fault)
        self.status = status

    def at(self, where: str) -> LibraryError:
        """Return the same error with another place, such as the name of the tensor."""
        fault = self.faults[0]
        moved = Fault(fault.code, where, fault.what, fault.value, fault.fix)
        return LibraryError(self.exit_code, moved, self.status)


def refused(name: str, status: int, sentence: str) -> LibraryError:
    """Return the error for a refused call.

    Args:
        name: The function of the ABI.
        status: What it returned.
        sentence: What nvfp4_last_error() said.
    """
    known = _STATUSES.get(status)
    code = f"NVFP4_{known.name}" if known else "NVFP4_EUNKNOWN"
    exit_code = ExitCode.BUG
    fix = "report it with this line, the call is the appliance's own"
    if known in _BAD_DATA:
        exit_code = ExitCode.CHECKPOINT_CORRUPT
        fix = "fetch or quantize the checkpoint again"
    elif known in _DEVICE:
        exit_code = ExitCode.GPU_FAULT
        fix = "run `appliance doctor` and look at the GPU's Xid messages"
    elif known is abi.Status.EUNSUPPORTED:
        exit_code = ExitCode.CHECKPOINT_UNSUPPORTED
        fix = "use a checkpoint of a supported group and scale type"
    value = f"'{sentence.removesuffix('.')}'"
    fault = Fault(code, name, "the kernel library must take the call", value, fix)
    return LibraryError(exit_code, fault, known)
