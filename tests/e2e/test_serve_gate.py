"""The gate as a start sees it: real NVML binding over the fake library, stand-in engine."""

from __future__ import annotations

import http.client
import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from modules import module_at

if TYPE_CHECKING:
    from conftest import Running, Start

FAKES = Path(__file__).parents[1] / "fakes/nvml"
HANG = -1


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> str:
    """LD_LIBRARY_PATH of the fake NVML and CUDA libraries."""
    build, base = module_at(FAKES / "build.py"), tmp_path_factory.mktemp("fakes")
    return f"{build.build_nvml(base / 'nvml')}:{build.build_cuda(base / 'cuda')}"


@pytest.fixture(scope="session")
def no_kernels(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """Return a copy of the packages without GPU kernels, which the fake driver cannot run."""
    root = tmp_path_factory.mktemp("packages")
    left_out = shutil.ignore_patterns("libnvfp4_sm70.so", "__pycache__")
    for package in ("appliance", "healthchecks"):
        shutil.copytree(repository / package, root / package, ignore=left_out)
    return root


@dataclass
class Host:
    """A machine with two V100s whose state a test may change while it is used."""

    start: Start
    folder: Path
    libraries: str
    packages: Path

    def scenario(self, change: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Write what NVML says from now on: a healthy machine after `change`."""
        machine = module_at(FAKES / "machine.py").healthy()
        if change is not None:
            change(machine)
        temporary = self.folder / "nvml.new"
        temporary.write_text(json.dumps(machine))
        temporary.replace(self.folder / "nvml.json")

    def serve(
        self,
        *,
        gate: str = "",
        cuda: dict[str, Any] | None = None,
        timeout: str = "20s",
        gpu_timeout: str = "5s",
        **more: Any,
    ) -> Running:
        """Start `appliance serve` on this machine."""
        devices = [f"0000:{0x10 + index:02x}:00.0" for index in range(2)]
        cuda_file = self.folder / "cuda.json"
        cuda_file.write_text(json.dumps({"devices": devices, **(cuda or {})}))
        variables = {
            "LD_LIBRARY_PATH": self.libraries,
            "NVML_FAKE_SCENARIO": str(self.folder / "nvml.json"),
            "NVML_FAKE_TRACE": str(self.folder / "trace"),
            "CUDA_FAKE_SCENARIO": str(cuda_file),
            "PYTHONPATH": str(self.packages),
            "PYTHONSAFEPATH": "1",
            "CC": "/bin/true",  # where tests run there need be no headers of Python
        } | more.pop("variables", {})
        behave = {"record": str(self.folder / "engine.json")} | more.pop("behave", {})
        return self.start(
            device="cuda",
            memory="",
            parallel="tensor",
            gate=f", gpu_timeout: {gpu_timeout}, timeout: {timeout}{gate}",
            variables=variables,
            behave=behave,
            **more,
        )

    def engine(self) -> dict[str, Any]:
        """Return command line and environment of the engine that was started."""
        return json.loads((self.folder / "engine.json").read_text())

    @property
    def engine_started(self) -> bool:
        """Whether any engine was started."""
        return (self.folder / "engine.json").exists()


@pytest.fixture
def host(start: Start, tmp_path: Path, libraries: str, no_kernels: Path) -> Host:
    """Return a machine with nothing wrong."""
    made = Host(start, tmp_path, libraries, no_kernels)
    made.scenario()
    return made


def dbe(machine: dict[str, Any]) -> None:
    """Let the second GPU have had a double-bit error since it was reset."""
    machine["gpus"][1]["ecc"]["volatile_dbe"] = 1


def no_peers(machine: dict[str, Any]) -> None:
    """Let the driver refuse peer access between the two."""
    machine["pairs"][0] |= dict.fromkeys(("read_ab", "read_ba", "write_ab", "write_ba"), 1)


def hanging(machine: dict[str, Any]) -> None:
    """Let NVML never come back from any call."""
    machine["faults"] = [{"call": "*", "hang_ms": HANG}]


def test_serve_healthy_gpus_start_the_engine_on_both_without_custom_all_reduce(host: Host) -> None:
    running = host.serve(variables={"CUDA_VISIBLE_DEVICES": "7", "NCCL_DEBUG": "TRACE"})

    running.wait_for("ready", 200)

    engine = host.engine()
    words = set(engine["argv"])
    assert {
        "--tensor-parallel-size=2",
        "--dtype=float16",
        "--disable-custom-all-reduce",
        "--middleware=appliance.serve.middleware.Gateway",
    } <= words
    chosen = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "VLLM_WORKER_MULTIPROC_METHOD")
    assert [engine["environ"][name] for name in chosen] == ["GPU-0,GPU-1", "PCI_BUS_ID", "spawn"]
    assert not {"NCCL_DEBUG", "NCCL_P2P_DISABLE"} & set(engine["environ"])
    assert running.status()["gate"]["verdict"] == "pass"
    metrics = running.get("/metrics")[1].decode()
    assert "appliance_gpus_ready 1.0" in metrics


def _no_ecc(machine: dict[str, Any]) -> None:
    for name in ("volatile_dbe", "volatile_sbe", "volatile_dbe_at"):
        machine["gpus"][0]["ecc"].pop(name)


@pytest.mark.parametrize(
    ("change", "code", "name"),
    [(dbe, 20, "GATE_FAILED"), (_no_ecc, 21, "GATE_UNKNOWN")],
    ids=["double-bit-error", "ecc-unreadable"],
)
def test_serve_unfit_gpu_is_refused_and_the_engine_never_starts(
    host: Host, change: Callable[[dict[str, Any]], None], code: int, name: str
) -> None:
    host.scenario(change)

    running = host.serve()

    assert running.wait() == code
    assert f"error[{name}] gpu:GPU-{1 if change is dbe else 0} ecc." in running.log.read_text()
    assert not host.engine_started
    assert running.named("engine.start") == []


def test_rc_057_serve_without_a_compiler_is_refused_with_12_before_the_engine(host: Host) -> None:
    running = host.serve(variables={"CC": "/nowhere/cc"})

    assert running.wait() == 12
    assert "error[NO_CC] Triton: a C compiler for its launcher, got no /nowhere/cc" in (
        running.log.read_text()
    )
    assert not host.engine_started


def test_serve_without_the_driver_library_is_refused_with_11(host: Host) -> None:
    running = host.serve(variables={"LD_LIBRARY_PATH": str(host.folder)})

    assert running.wait() == 11
    said = running.log.read_text()
    assert "error[NO_GPU] this machine: " in said
    assert "container toolkit, or set execution.device: cpu." in said
    assert "--assume" not in said  # serve takes no such option
    assert not host.engine_started


def test_serve_nvml_that_hangs_before_the_plan_ends_with_21_by_its_deadline(host: Host) -> None:
    host.scenario(hanging)

    running = host.serve(timeout="2s", gpu_timeout="1s")
    running.until(running.family, "a child that reads")

    assert running.wait(15) == 21
    assert not host.engine_started
    running.assert_nothing_left()


def test_serve_nvml_that_hangs_in_the_gate_ends_with_21_and_probes_answer_meanwhile(
    host: Host,
) -> None:
    running = host.serve(timeout="5s", gpu_timeout="1s")
    running.until(lambda: running.named("serve.start"), "a plan")
    host.scenario(hanging)
    running.until(lambda: running.probe("startup")[0], "an answer")
    running.until(running.family, "a child that reads")

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    asked = subprocess.run(
        (sys.executable, "-m", "healthchecks.probes.startup", f"--port={running.admin_port}"),
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)

    assert (asked.returncode, asked.stdout.split()[0]) == (1, "GATING")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.15
    assert running.probe("live") == (200, "GATING")
    assert running.wait(15) == 21
    assert not host.engine_started
    running.assert_nothing_left()


def test_serve_sigterm_while_the_gate_hangs_ends_with_0_and_leaves_nothing(host: Host) -> None:
    running = host.serve(timeout="60s", gpu_timeout="60s")
    running.until(lambda: running.named("serve.start"), "a plan")
    host.scenario(hanging)
    running.until(lambda: running.probe("startup")[0], "an answer")
    running.until(running.family, "a child that reads")

    running.stop()

    assert running.wait(10) == 0
    running.assert_nothing_left(3)


def test_serve_without_peer_access_starts_with_nccl_p2p_off_and_says_why(host: Host) -> None:
    host.scenario(no_peers)

    running = host.serve(cuda={"peer_access": 0})
    running.wait_for("ready", 200)

    engine = host.engine()
    assert engine["environ"]["NCCL_P2P_DISABLE"] == "1"
    assert engine["argv"].count("--disable-custom-all-reduce") == 1
    reasons = running.status()["gate"]["launch_adjustments"]["reasons"]
    assert any("peer" in reason or "P2P" in reason for reason in reasons), reasons
    assert [each["reason"] for each in running.named("gate.adjustment")] == reasons


def test_serve_warn_mode_starts_on_an_unfit_gpu_with_a_warning(host: Host) -> None:
    host.scenario(dbe)

    running = host.serve(gate=", mode: warn")
    running.wait_for("ready", 200)

    found = [each for each in running.named("gate.check") if each["id"].startswith("ecc.dbe")]
    assert {each["level"] for each in found} == {"warning"}
    assert host.engine_started


def test_serve_double_bit_error_while_serving_drains_and_ends_with_42(host: Host) -> None:
    running = host.serve(
        runtime=", thermal: {sample_interval: 1s}", behave={"tokens": 24, "token_s": 0.0}
    )
    running.wait_for("ready", 200)
    running.family()
    running.behave(tokens=100, token_s=0.05)
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 100, "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()

    host.scenario(dbe)

    assert running.wait_for("ready", 503) == "GPU_FAULT"
    assert running.probe("live")[0] == 200
    assert b"[DONE]" in answer.read()
    connection.close()
    assert running.wait() == 42
    assert "error[GPU_FAULT] gpu:GPU-1 ecc.dbe.volatile: " in running.log.read_text()
    running.assert_nothing_left()


def test_serve_double_bit_error_is_reported_and_liveness_stays(host: Host) -> None:
    running = host.serve(runtime=", on_gpu_fault: report, thermal: {sample_interval: 1s}")
    running.wait_for("ready", 200)

    host.scenario(dbe)

    assert running.wait_for("ready", 503) == "GPU_FAULT"
    assert running.probe("live") == (200, "READY")
    assert "ecc.dbe.volatile" in running.status()["gpu_fault"]
    running.stop(signal.SIGTERM)
    assert running.wait() == 0
