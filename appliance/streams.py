"""Standard streams as a command may find them: closed, full, or unable to spell a file's name."""

from __future__ import annotations

import errno
import io
import os
import sys

_LOST = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def prepare() -> None:
    """Open what is closed onto nothing, and let streams escape letters that they cannot encode.

    With a descriptor of 0 to 2 free, the next file that is opened would get it, and what is printed
    would end in that file.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:  # noqa: PLR2004 - stdin, stdout and stderr
        os.set_inheritable(descriptor, True)
        descriptor = os.dup(descriptor)
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def is_output_lost(error: Exception) -> bool:
    """Tell whether an error is that of a stream that takes no more; one of a file has its name."""
    return isinstance(error, OSError) and error.filename is None and error.errno in _LOST


def settle() -> None:
    """Flush both outputs; what cannot be written vanishes, else the interpreter ends with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)
