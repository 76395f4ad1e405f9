"""Section `startup`: how the engine is brought up."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from appliance.config.base import Duration, Section


class StartupSection(Section):
    """How the engine is brought up."""

    timeout: Duration = Field(
        default=1800.0,
        ge=10.0,
        le=86_400.0,
        description="Deadline from spawning the engine to its first answer. Orchestrators' "
        "start-up probes are rendered from it.",
    )
    canary: bool = Field(
        default=True,
        description="Ready only after real generations came back sane.",
    )
    min_decode_rate: Annotated[float, Field(gt=0.0, le=100_000.0)] | None = Field(
        default=None,
        description="Tokens a second of the canary's requests together, below which the start is "
        "reported as slow. `null` reports nothing.",
    )
    ladder: bool = Field(
        default=True,
        description="Try again with safer settings, each named in the log, when the engine does "
        "not start.",
    )
