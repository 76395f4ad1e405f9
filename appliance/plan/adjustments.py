"""What the gate's measurements change about a launch: variables and flags, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def _no_variables() -> Mapping[str, str]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Adjustments:
    """Additions to a rendered launch.

    Attributes:
        env: Variables such as `NCCL_P2P_DISABLE`; they win over rendered ones of that name.
        args: Flags such as `--disable-custom-all-reduce`, one word each, added at the end.
        reasons: The measurement behind them, one sentence each.
    """

    env: Mapping[str, str] = field(default_factory=_no_variables)
    args: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


NO_ADJUSTMENTS = Adjustments()
