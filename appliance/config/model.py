"""Section `model`: which checkpoint is served, and under what name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from appliance.config.base import ABSOLUTE_PATH, PATH_PATTERN, Auto, Section, Written

AbsolutePath = Annotated[str, Field(pattern=PATH_PATTERN, max_length=4096), ABSOLUTE_PATH]
ServedName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$"),
    Written("a name of 1 to 128 letters, digits, dots, underscores, slashes and dashes"),
]
ContextLength = Annotated[int, Field(ge=16, le=4_194_304)]


class ModelSection(Section):
    """Which checkpoint is served, and under what name."""

    path: AbsolutePath = Field(
        description="Directory of the checkpoint, as the process that serves it sees it. Never a "
        "hub name: nothing is downloaded.",
    )
    served_name: ServedName = Field(
        default="quasar",
        description="Name clients put in the `model` field of a request.",
    )
    format: Literal["auto", "nvfp4", "fp8", "dense"] = Field(
        default="auto",
        description="`auto` decides by the tensors; another value makes a differing checkpoint an"
        " error.",
    )
    lenient: Literal["none", "tensors-win"] = Field(
        default="none",
        description="What is done with modules that the checkpoint's exclude list names and that "
        "are packed all the same: `none` refuses them, `tensors-win` loads what the tensors are, "
        "with a warning.",
    )
    max_model_len: Auto | ContextLength = Field(
        default="auto",
        description="Longest prompt plus answer, in tokens. `auto` takes what the memory holds, "
        "at most the model's own limit.",
    )
    integrity: Literal["off", "size", "sha256"] = Field(
        default="size",
        description="How the files are checked before loading: not at all, headers and sizes, or "
        "a SHA-256 manifest.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that ships inside the checkpoint. It runs with every right "
        "of the server.",
    )
    chat_template: AbsolutePath | None = Field(
        default=None,
        description="File with a chat template that replaces the checkpoint's own.",
    )
