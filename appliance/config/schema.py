"""The whole configuration: one model, one section a file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from appliance.config.base import Section, Whole
from appliance.config.execution import ExecutionSection
from appliance.config.gate import GateSection
from appliance.config.logging import LoggingSection
from appliance.config.memory import MemorySection
from appliance.config.model import ModelSection
from appliance.config.parallel import ParallelSection
from appliance.config.runtime import RuntimeSection
from appliance.config.server import ServerSection
from appliance.config.startup import StartupSection


class Config(Section):
    """The appliance's one configuration file."""

    version: Annotated[Literal[1], Whole] = Field(description="Version of this file's schema.")
    model: ModelSection = Field(description="Which checkpoint is served, and under what name.")
    parallel: ParallelSection = Field(
        default_factory=ParallelSection,
        description="Which GPUs are used and how the model is cut over them.",
    )
    memory: MemorySection = Field(
        default_factory=MemorySection, description="What may be taken of each GPU and of the host."
    )
    execution: ExecutionSection = Field(
        default_factory=ExecutionSection, description="The engine's device and its switches."
    )
    gate: GateSection = Field(
        default_factory=GateSection,
        description="The hardware policy that decides whether the engine may start.",
    )
    server: ServerSection = Field(
        default_factory=ServerSection,
        description="Where it listens, who may call, and how it stops.",
    )
    startup: StartupSection = Field(
        default_factory=StartupSection, description="How the engine is brought up."
    )
    runtime: RuntimeSection = Field(
        default_factory=RuntimeSection, description="What is watched while it serves."
    )
    logging: LoggingSection = Field(
        default_factory=LoggingSection, description="Form and detail of the event log on stderr."
    )
