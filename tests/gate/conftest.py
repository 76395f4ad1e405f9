"""The fake NVML and CUDA libraries, and what the gate's scenario tests share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plans
import pytest
from modules import module_at

from appliance.gate.defaults import plain_section
from appliance.plan.launch_plan import LaunchPlan, ParallelPlan
from healthchecks.collect import Depth, collect
from healthchecks.facts import KernelFacts
from healthchecks.plan import GatePlan
from healthchecks.policy import policy_of
from healthchecks.runner import Options, run

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests" / "fakes" / "nvml"
SAMPLES = ROOT.parent / "shared" / "health_samples"


def pytest_generate_tests(metafunc):
    """Give `sample_path` every record there is, so that a new record is one new file."""
    if "sample_path" in metafunc.fixturenames:
        paths = sorted(path for path in SAMPLES.glob("*.json") if path.name != "index.json")
        if not paths:
            paths = [pytest.param(None, marks=pytest.mark.skip(reason="no shared folder"))]
        metafunc.parametrize("sample_path", paths, ids=lambda path: getattr(path, "stem", "none"))


@pytest.fixture(scope="session")
def libraries(tmp_path_factory) -> dict[str, Path]:
    """Folders of the built fake libraries: NVML by driver, and CUDA."""
    build = module_at(FAKES / "build.py")
    base = tmp_path_factory.mktemp("fakes")
    found = {driver: build.build_nvml(base / driver, driver) for driver in build.MISSING}
    return found | {"cuda": build.build_cuda(base / "cuda")}


@pytest.fixture(scope="session")
def convert():
    """The converter from a record to a scenario."""
    return module_at(FAKES / "convert.py")


healthy = module_at(FAKES / "machine.py").healthy


@pytest.fixture
def lab(monkeypatch, tmp_path, libraries):
    """Put fakes before the real bindings and say what the machine is."""
    scenario, cuda_file, trace = (tmp_path / name for name in ("nvml.json", "cuda.json", "trace"))
    monkeypatch.setenv("NVML_FAKE_SCENARIO", str(scenario))
    monkeypatch.setenv("NVML_FAKE_TRACE", str(trace))
    monkeypatch.setenv("CUDA_FAKE_SCENARIO", str(cuda_file))
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)

    def machine(change: dict[str, Any] | None = None, driver: str = "newest") -> None:
        scenario.write_text(json.dumps(healthy() if change is None else change))
        monkeypatch.setenv("LD_LIBRARY_PATH", f"{libraries[driver]}:{libraries['cuda']}")

    def cuda(**changes: Any) -> None:
        devices = [f"0000:{0x10 + index:02x}:00.0" for index in range(2)]
        cuda_file.write_text(json.dumps({"devices": devices, **changes}))

    def plan(kind: str = "tp2", gate: dict[str, Any] | None = None) -> GatePlan:
        section = {
            **plain_section(),
            "state_dir": str(tmp_path / "state"),
            "timeout": 8.0,
            "gpu_timeout": 2.0,
        }
        for key, value in (gate or {}).items():
            section[key] = {**section[key], **value} if isinstance(value, dict) else value
        uuids = ("GPU-0",) if kind == "single" else ("GPU-0", "GPU-1")
        return GatePlan(kind=kind, uuids=uuids, policy=policy_of(section), utilization=0.9)

    machine()
    cuda()
    return SimpleNamespace(
        machine=machine, cuda=cuda, plan=plan, healthy=healthy, trace=trace, tmp=tmp_path
    )


@pytest.fixture
def gate(lab):
    """Run the gate on the fake NVML; `facts` and `pair` change what else would be seen."""

    def go(kind="tp2", policy=None, pair=None, **facts):
        def read(plan, _depth):
            found = collect(plan, Depth(cuda=False))
            found = replace(
                found,
                gpus=tuple(replace(gpu, alloc="ok") for gpu in found.gpus),
                pairs=tuple(
                    replace(item, **{"functional": "ok", **(pair or {})}) for item in found.pairs
                ),
                kernel=KernelFacts("read"),
                pci_gpus=None,
                environment={},
            )
            return replace(found, **facts)

        return run(lab.plan(kind, policy), Options(read=read))

    return go


@pytest.fixture(scope="session")
def sample_folder() -> Path:
    """Return the folder of recorded machines and schemas."""
    if not SAMPLES.is_dir():
        pytest.skip("no shared folder")
    return SAMPLES


@pytest.fixture
def config_file(tmp_path):
    """Return a function that writes a configuration file for a GPU host and returns its path."""

    def write(*gate_lines: str) -> str:
        lines = [f"state_dir: {tmp_path / 'state'}", "gpu_timeout: 2s", *gate_lines]
        section = "".join(f"  {line}\n" for line in lines)
        path = tmp_path / "appliance.yaml"
        path.write_text(
            f"version: 1\nmodel:\n  path: {tmp_path}\n  served_name: m\ngate:\n{section}"
        )
        return str(path)

    return write


@pytest.fixture
def launch_plan(tmp_path):
    """Return a function from a device to a launch plan: tensor parallel, or the CPU engine."""

    def make(device: str) -> LaunchPlan:
        plan = plans.make_plan()
        if device == "cpu":
            alone = ParallelPlan("single", 1, 1, (), ())
            execution = replace(plan.execution, device="cpu", attention_backend=None)
            plan = replace(plan, parallel=alone, execution=execution)
        else:
            pair = replace(plan.parallel, gpus=("GPU-0", "GPU-1"))  # the lab's
            plan = replace(plan, parallel=pair)
        return replace(plan, gate={**plain_section(), "state_dir": str(tmp_path / "state")})

    return make
