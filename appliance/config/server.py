"""Section `server`: where it listens, who may call, and how it stops."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from appliance.config.base import Duration, Section, Size, Written
from appliance.config.model import AbsolutePath
from appliance.units import GIB, KIB, MIB


def _address(value: str) -> str:
    if value != "localhost":
        ip_address(value)  # its ValueError is the refusal
    return value


Port = Annotated[int, Field(ge=1, le=65_535)]
Host = Annotated[str, AfterValidator(_address), Written("an IP address or `localhost`")]
"""No other name: what it stands for would be asked of a name server at every start."""


class LimitsSection(Section):
    """What one client may ask for."""

    max_request_size: Size = Field(
        default=4 * MIB,
        ge=KIB,
        le=GIB,
        description="Bytes of one request body; more is answered 413.",
    )
    max_concurrent_requests: int = Field(
        default=256, ge=1, le=65_536, description="Requests in flight; one more is answered 429."
    )
    requests_per_minute_per_key: int = Field(
        default=0, ge=0, le=1_000_000, description="Requests a minute of one key; 0 means no limit."
    )


class ServerSection(Section):
    """Where it listens, who may call, and how it stops."""

    host: Host = Field(
        default="127.0.0.1",
        description="Address of the API. Any address but loopback needs `api_keys_file`.",
    )
    port: Port = Field(default=8000, description="Port of the OpenAI-compatible API.")
    api: Literal["all", "completions_only"] = Field(
        default="all",
        description="`all` needs a chat template, in the checkpoint or as `model.chat_template`, "
        "and asks for a chat answer before ready; `completions_only` does without.",
    )
    admin_host: Host = Field(
        default="127.0.0.1",
        description="Address of the admin port. It has no keys: whoever reaches it can drain the "
        "server.",
    )
    admin_port: Port = Field(default=9400, description="Port of probes, status, metrics and drain.")
    api_keys_file: AbsolutePath | None = Field(
        default=None,
        description="File with one API key a line. `null` means no keys, which only a loopback "
        "`host` may have.",
    )
    limits: LimitsSection = Field(
        default_factory=LimitsSection, description="What one client may ask for."
    )
    drain_timeout: Duration = Field(
        default=60.0,
        ge=0.0,
        le=3600.0,
        description="How long requests in flight may still run after a stop signal. "
        "Orchestrators' grace periods are rendered from it.",
    )
