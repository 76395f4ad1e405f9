"""Section `logging`: form and detail of the event log on stderr."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from appliance.config.base import Section


class LoggingSection(Section):
    """Form and detail of the event log on stderr."""

    format: Literal["json", "text"] = Field(
        default="json",
        description="One JSON object a line, or `event key=value` lines.",
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="Least severe event that is written, by the appliance and by vLLM.",
    )
