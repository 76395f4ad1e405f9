"""The one place where operations of the kernel library become operations of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_DEFINED: list[Any] = []
"""Libraries of torch: an operation is gone when its library is."""


def define(
    namespace: str,
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
) -> None:
    """Define one operation for tensors of every device; callers take care to do it once.

    Args:
        namespace: As in `torch.ops`.
        schema: Name, arguments and result as torch reads them.
        function: What computes it.
        fake: Gives the result's shape and type to compilers and graphs, which see one opaque node;
            None for an operation that works on such tensors as it is.
    """
    registry: Any = torch.library  # its functions have no types
    library = registry.Library(namespace, "FRAGMENT")
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, function, "CompositeExplicitAutograd")
    if fake is not None:
        registry.register_fake(f"{namespace}::{name}", fake, lib=library)
    _DEFINED.append(library)
