"""Reported faults of command lines, environment and probes, by the id of the case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from planned import plan_of

from appliance.config.load import load_config
from appliance.render.argv import engine_command, vllm_argv

Run = Callable[..., Any]
Model = Callable[..., Path]
Validate = Callable[..., Any]


def kubernetes(appliance: Run, configuration: Path, path: Path) -> dict[str, Any]:
    words = ("--config", configuration, "--model", path, "--assume", "2x16GiB")
    ended = appliance("render", "--format", "k8s", *words)
    assert ended.code == 0, ended.err
    return yaml.safe_load(ended.out)


def test_rc_048_no_service_is_named_vllm_and_service_links_are_off(
    appliance: Run, file: Callable[..., Path], model: Model, repository: Path
) -> None:
    path = model()
    patch = kubernetes(appliance, file(path), path)
    names = [patch["metadata"]["name"]]
    names += [each["name"] for each in patch["spec"]["template"]["spec"]["containers"]]
    names += yaml.safe_load((repository / "compose.yaml").read_text())["services"]

    assert patch["spec"]["template"]["spec"]["enableServiceLinks"] is False
    assert not any("vllm" in name.lower() for name in names)


@pytest.mark.parametrize(
    ("name", "value"),
    [("swap-space", 4), ("cuda-graph-sizes", 8), ("disable-log-requests", True), ("serve", True)],
)
def test_rc_049_flag_of_another_version_is_refused_at_its_line(
    validate: Validate, model: Model, name: str, value: object
) -> None:
    ended = validate(model(), execution={"extra_args": {name: value}})

    assert (ended.code, ended.codes) == (10, ["FLAG_UNKNOWN"])
    assert f"execution.extra_args.{name}" in ended.err or f"`{name}`" in ended.err


def test_rc_049_rendered_line_has_flags_only_and_starts_no_subcommand_twice(
    validate: Validate, model: Model
) -> None:
    plan = plan_of(validate(model(), "1x16GiB", "--json"))

    command = engine_command(vllm_argv(plan), "python")

    assert command[:3] == ("python", "-m", "vllm.entrypoints.openai.api_server")
    assert all(word.startswith("--") for word in command[3:])


@pytest.mark.parametrize("timeout", ["15m", "47m", "95s"])
def test_rc_051_every_orchestrator_waits_as_long_as_the_engine_may_load(
    appliance: Run, file: Callable[..., Path], model: Model, timeout: str
) -> None:
    path = model()
    configuration = file(path, startup={"timeout": timeout})
    seconds = load_config(configuration).config.startup.timeout
    patch = kubernetes(appliance, configuration, path)
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}
    words = ("--config", configuration, "--model", path, "--assume", "2x16GiB")
    compose = appliance("render", "--format", "compose", *words).out
    env = appliance("render", "--format", "env", *words).out

    assert probes["startup"]["failureThreshold"] * probes["startup"]["periodSeconds"] >= seconds
    assert not any("initialDelaySeconds" in probe for probe in probes.values())
    assert f"start_period: {seconds:g}s" in compose
    assert f"VLLM_ENGINE_READY_TIMEOUT_S={seconds:g}" in env


def test_rc_041_rendered_probes_are_patient(
    appliance: Run, file: Callable[..., Path], model: Model, repository: Path
) -> None:
    path = model()
    patch = kubernetes(appliance, file(path), path)
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    engine = yaml.safe_load((repository / "compose.yaml").read_text())["services"]["engine"]

    for kind in ("liveness", "readiness"):
        assert container[f"{kind}Probe"]["timeoutSeconds"] >= 10
        assert container[f"{kind}Probe"]["failureThreshold"] >= 3
    assert engine["healthcheck"]["timeout"] == "10s"
    assert engine["healthcheck"]["retries"] >= 3
