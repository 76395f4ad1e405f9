"""Whether the card's InfoROM, which holds its error history, is intact."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from healthchecks.context import Context
    from healthchecks.result import CheckResult


def check(context: Context) -> Iterator[CheckResult]:
    """Judge the checksum of every GPU of the plan."""
    for gpu in context.gpus:
        subject = context.on_gpu("inforom.valid", gpu)
        if gpu.inforom_valid is None:
            yield subject.missing("inforom_valid", "checksum right")
        elif gpu.inforom_valid:
            yield subject.passes("valid", "checksum right")
        else:
            yield subject.fails(
                "corrupted",
                "checksum right",
                "the InfoROM is corrupted, so that its error history cannot be trusted",
                remedy="replace the card or have its InfoROM restored by the vendor",
                scope="hardware_service",
            )
