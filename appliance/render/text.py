"""Rendered items as text for people and for files; values are never shown where they are secret."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from appliance.render.environ import DROPPED_PREFIXES, KEPT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.render.argv import Rendered
    from appliance.render.environ import Variable


def argv_text(items: Sequence[Rendered], *, explain: bool = False) -> str:
    """Return one item a line, quoted for a shell; with `explain` each followed by its origin."""
    rows = [(shlex.join(item.words), item.origin) for item in items]
    return _lines(rows, explain=explain)


def environment_text(
    variables: Sequence[Variable], *, explain: bool = False, dropped: Sequence[str] = ()
) -> str:
    """Return one `NAME=value` a line, as an env file takes it.

    Args:
        variables: What `environment` returned.
        explain: Add each origin, and what is dropped of the inherited environment.
        dropped: Names that are set here and would be dropped.
    """
    rows = [(f"{variable.name}={variable.value}", variable.origin) for variable in variables]
    text = _lines(rows, explain=explain)
    if not explain:
        return text
    prefixes = ", ".join(f"{prefix}*" for prefix in DROPPED_PREFIXES)
    text += f"# dropped when inherited: {prefixes}\n# but kept: {', '.join(sorted(KEPT))}\n"
    return text + f"# dropped here: {', '.join(dropped) or 'none'}\n"


def _lines(rows: Sequence[tuple[str, str]], *, explain: bool) -> str:
    if not explain:
        return "".join(f"{item}\n" for item, _ in rows)
    width = min(60, max((len(item) for item, _ in rows), default=0))
    return "".join(f"{item:<{width}}  # {origin}\n" for item, origin in rows)
