"""The child that lets the kernel library test itself on one GPU: `LIBRARY`; one JSON line out.

The parent makes that GPU the only visible one.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_OK = 0
_WRONG = 17  # NVFP4_ESELFTEST of kernels/include/nvfp4.h; any other status measured nothing


def main(arguments: Sequence[str]) -> int:
    """Run the library's fixed problems and say `ok` or its sentence on the first wrong value."""
    try:
        library = ctypes.CDLL(arguments[0])
        sentence = library.nvfp4_last_error
        sentence.restype = ctypes.c_char_p
        status = int(library.nvfp4_self_test(ctypes.c_int32(0), None))
    except (OSError, AttributeError) as error:
        _say({"error": str(error)})
        return 0
    if status == _OK:
        _say({"selftest": "ok"})
    else:
        words = bytes(sentence()).decode(errors="replace").rstrip(".")
        _say({"selftest": f"wrong: {words}"} if status == _WRONG else {"error": words})
    return 0


def _say(step: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(step) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
