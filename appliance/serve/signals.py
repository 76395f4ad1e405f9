"""Stop signals, taken as the first thing a run does; quick to import for that reason."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class StopSignals:
    """Turns SIGTERM, SIGINT and SIGHUP into calls, also those that came before anybody listened."""

    def __init__(self) -> None:
        """Take the signals from now on."""
        self._came = 0
        self._listener: Callable[[], None] | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # A shell's nohup asks for SIGHUP to mean nothing; that is kept.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._take)

    @property
    def came(self) -> bool:
        """Whether a stop was asked for."""
        return self._came > 0

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` for every signal, at once for those that came before."""
        self._listener = listener
        for _ in range(self._came):
            listener()

    def _take(self, _number: int, _frame: object) -> None:
        self._came += 1
        if self._listener is not None:
            self._listener()
