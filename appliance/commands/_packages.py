"""Refuses a verb whose packages are not installed, with the command that installs them."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    from collections.abc import Sequence


def require_packages(verb: str, packages: Sequence[str]) -> None:
    """Look for packages without importing them.

    Raises:
        ApplianceError: PACKAGE_MISSING, exit 2.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ApplianceError(
            ExitCode.USAGE,
            Fault(
                "PACKAGE_MISSING",
                verb,
                f"the packages {', '.join(packages)} are installed",
                f"no {', '.join(missing)}",
                f"run `pip install {' '.join(missing)}`",
            ),
        )
