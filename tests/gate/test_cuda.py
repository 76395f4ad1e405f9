"""The CUDA probes against a fake driver library: contexts, copies, hangs, crashes, lies."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from healthchecks.collect import Depth, collect
from healthchecks.cuda_child import first_difference
from healthchecks.nvml import read_host
from healthchecks.probing import listen, probe_collective, probe_gpu, probe_pair, probe_selftest
from healthchecks.runner import Options, run

MIB = 1024**2
FAST = Depth()


def host():
    return read_host(timeout_s=10.0, gpu_timeout_s=5.0)


def copied(timeout_s=10.0):
    """Return the pair after the functional test and how long it took."""
    machine = host()
    started = time.monotonic()
    pair, stuck = probe_pair(machine.pairs[0], *machine.gpus, MIB, timeout_s)
    assert stuck == 0
    return pair, time.monotonic() - started


@pytest.mark.usefixtures("lab")
def test_gpu_that_works_is_proven_and_its_link_measured():
    gpu, _ = probe_gpu(host().gpus[0], 20.0)

    assert gpu.alloc == "ok"
    assert (gpu.pcie.loaded_width, gpu.pcie.loaded_generation) == (16, 3)
    assert gpu.pcie.loaded_gb_s > 0
    assert gpu.pcie.replays_during_load == 0


def test_link_that_wakes_up_under_load_is_measured_awake(lab):
    scenario = lab.healthy()
    for gpu in scenario["gpus"]:
        gpu["pcie"]["generation"] = 1
    lab.machine(scenario)
    idle = host().gpus[0]
    scenario["gpus"][0]["pcie"]["generation"] = 3
    lab.machine(scenario)

    loaded, _ = probe_gpu(idle, 20.0)

    assert (loaded.pcie.generation, loaded.pcie.loaded_generation) == (1, 3)


@pytest.mark.parametrize(
    ("cuda", "said"),
    [
        ({"init": 999}, "cuInit: CUDA_ERROR_UNKNOWN (999)"),
        ({"devices": []}, "cuDeviceGetByPCIBusId"),
        ({"context": [2]}, "cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY (2)"),
        ({"alloc": [2]}, "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)"),
    ],
    ids=["init", "device", "context", "allocation"],
)
def test_gpu_that_cuda_refuses_says_which_call_and_why(lab, cuda, said):
    lab.cuda(**cuda)

    gpu, _ = probe_gpu(host().gpus[0], 20.0)

    assert gpu.alloc.startswith(said)


def test_gpu_without_the_cuda_library_says_so(lab, libraries, monkeypatch):
    machine = host()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries["newest"]))
    (lab.tmp / "libcuda.so.1").write_bytes(b"")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{lab.tmp}:{libraries['newest']}")

    gpu, _ = probe_gpu(machine.gpus[0], 20.0)

    assert gpu.alloc.startswith("libcuda.so.1: ")


@pytest.mark.usefixtures("lab")
def test_pair_that_works_is_ok_with_its_rate():
    pair, _ = copied()

    assert (pair.functional, pair.functional_detail) == ("ok", "")
    assert pair.functional_gb_s > 0


@pytest.mark.parametrize("direction", ["ab", "ba"])
@pytest.mark.parametrize(
    ("mode", "outcome"),
    [("zeros", "mismatch"), ("flip", "mismatch"), ("segv", "crash"), ("refuse", "error")],
)
def test_pair_that_fails_in_one_direction_is_found(lab, direction, mode, outcome):
    lab.cuda(peer=mode, direction=direction)

    pair, _ = copied()

    assert pair.functional == outcome
    assert ("a->b" if direction == "ab" else "b->a") in pair.functional_detail


def test_pair_that_flips_one_bit_names_the_byte(lab):
    lab.cuda(peer="flip")

    assert f"first wrong byte at {MIB // 2} of {MIB}" in copied()[0].functional_detail


def test_pair_that_crashes_names_the_signal(lab):
    lab.cuda(peer="segv")

    assert copied()[0].functional_detail == "copy a->b: signal 11 (SIGSEGV)"


def test_pair_that_hangs_ends_at_its_deadline(lab):
    lab.cuda(peer="hang")

    pair, took_s = copied(timeout_s=2.0)

    assert pair.functional == "hang"
    assert pair.functional_detail == "copy a->b: no end in 2 s"
    assert took_s < 4.0


def test_pair_without_peer_access_is_not_copied(lab):
    lab.cuda(peer_access=0)

    assert copied()[0].functional == "no_access"


@pytest.mark.parametrize(
    ("found", "wanted", "at"),
    [(b"abc", b"abc", None), (b"abc", b"abd", 2), (b"x" * 9000, b"x" * 8999 + b"y", 8999)],
)
def test_first_difference(found, wanted, at):
    assert first_difference(found, wanted) == at


def test_listen_tells_a_signal_from_a_status_and_keeps_the_lines():
    killed = listen(
        [sys.executable, "-c", "import os; print('{}', flush=True); os.kill(os.getpid(), 9)"], 10.0
    )
    failed = listen([sys.executable, "-c", "raise SystemExit(3)"], 10.0)

    assert (killed.end, killed.signal_name, len(killed.steps)) == ("crash", "signal 9 (SIGKILL)", 1)
    assert (failed.end, failed.signal_name) == ("crash", "exit status 3")


def test_collect_leaves_a_gpu_that_fails_alone_out_of_the_pair(lab):
    lab.cuda(alloc=[0, 2])

    facts = collect(lab.plan("tp2"), FAST)

    assert [gpu.alloc == "ok" for gpu in facts.gpus] == [True, False]
    assert facts.pairs[0].functional is None


@pytest.mark.parametrize(("lie", "outcome"), [("none", "ok"), ("drop", "mismatch")])
def test_pair_behind_a_library_that_lies_is_found_out(lab, libraries, monkeypatch, lie, outcome):
    source = Path(__file__).parents[1] / "gpu" / "lying_libcuda.c"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    liar = lab.tmp / "libcuda.so.1"
    subprocess.run(["gcc", *flags, "-o", liar, source, "-ldl"], check=True)
    monkeypatch.setenv("REAL_LIBCUDA", str(libraries["cuda"] / "libcuda.so.1"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{lab.tmp}:{libraries['newest']}")
    monkeypatch.setenv("LIE", lie)

    assert copied()[0].functional == outcome


SELF_TEST = """
#include <stdint.h>
#include <stdlib.h>
const char* nvfp4_last_error(void) { return "problem 2 row 3 column 7: got 1.5, want 1.25"; }
int nvfp4_self_test(int32_t device, void* result) {
  (void)result;
  if (!getenv("CUDA_VISIBLE_DEVICES")) return 9;
  if (getenv("SELF_TEST_DIES")) abort();
  if (device == 0 && getenv("SELF_TEST_DEVICE")) return 18;
  return device == 0 && getenv("SELF_TEST_FAILS") ? 17 : 0;
}
"""


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("", "ok"),
        ("SELF_TEST_FAILS", "wrong: problem 2 row 3 column 7: got 1.5, want 1.25"),
        ("SELF_TEST_DEVICE", "problem 2 row 3 column 7: got 1.5, want 1.25"),
        ("SELF_TEST_DIES", "crash signal 6 (SIGABRT)"),
    ],
)
def test_self_test_of_the_kernels_runs_on_the_one_gpu(lab, monkeypatch, variable, said):
    source, library = lab.tmp / "selftest.c", lab.tmp / "libkernels.so"
    source.write_text(SELF_TEST)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    if variable:
        monkeypatch.setenv(variable, "1")

    gpu, stuck = probe_selftest(host().gpus[0], library, 20.0)

    assert (gpu.selftest, stuck) == (said, 0)


def test_self_test_without_a_library_says_so(lab):
    gpu, _ = probe_selftest(host().gpus[0], lab.tmp / "absent.so", 20.0)

    assert "absent.so" in gpu.selftest


@pytest.mark.slow
def test_collective_of_two_ranks_gives_the_right_sums():
    outcome, detail = probe_collective(("", ""), 90.0, p2p=True, backend="gloo")

    assert outcome == "ok", detail
    assert "16777216 bytes" in detail


@pytest.mark.slow
def test_collective_that_cannot_start_says_why():
    outcome, detail = probe_collective(("", ""), 90.0, p2p=True, backend="none")

    assert outcome == "error"
    assert "none" in detail


@pytest.mark.slow
def test_collective_that_hangs_ends_at_its_deadline(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = time.monotonic()

    outcome, detail = probe_collective(("", ""), 1.0, p2p=False)

    assert (outcome, detail) == ("hang", "rank 0 in 1 s: after nothing")
    assert time.monotonic() - started < 4.0


def test_collective_whose_rank_is_killed_is_a_crash(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    assert probe_collective(("", ""), 20.0, p2p=True) == ("crash", "rank 0: signal 11 (SIGSEGV)")


def test_gate_from_start_to_end_passes_within_its_time(lab, monkeypatch):
    monkeypatch.setattr("healthchecks.collect.has_torch", lambda: False)
    started = time.monotonic()

    report = run(lab.plan("tp2"))

    assert report.verdict in ("pass", "warn"), report.to_json()
    assert {result.id for result in report.worst()} <= {"host.gpu_unlinked"}
    assert time.monotonic() - started < 15.0
    assert (
        json.loads((lab.tmp / "state" / "state.json").read_text())["gpus"]["GPU-0"]["best_width"]
        == 16
    )


def test_gate_is_quicker_than_its_deadline_when_nvml_hangs(lab):
    lab.machine(lab.healthy() | {"faults": [{"call": "nvmlInitWithFlags", "hang_ms": -1}]})
    plan = lab.plan("tp2", {"timeout": 2.0})
    started = time.monotonic()

    report = run(plan)

    assert (report.verdict, report.exit_code) == ("unknown", 21)
    assert time.monotonic() - started < 2.0 + 2.0


def test_rc_016_gate_waits_for_memory_that_an_ending_program_holds(lab, monkeypatch):
    monkeypatch.setattr("healthchecks.collect.FREE_STEP_S", 0.05)
    looks = []

    def read(**_times):
        looks.append(len(looks))
        machine = host()
        held = {0: 20, 1: 20, 2: 0, 3: 0}.get(looks[-1], 0) * 1024**3
        gpus = tuple(replace(gpu, memory_free_bytes=32 * 1024**3 - held) for gpu in machine.gpus)
        return replace(machine, gpus=gpus)

    monkeypatch.setattr("healthchecks.collect.read_host", read)

    facts = collect(lab.plan("single"), Depth(cuda=False, wait_free_s=20.0))

    assert facts.gpus[0].memory_free_bytes == 32 * 1024**3
    assert len(looks) == 4, "the last two looks must agree"


def test_gate_does_not_wait_for_memory_for_ever(lab):
    scenario = lab.healthy()
    scenario["gpus"][0]["memory"]["used"] = 20 * 1024**3
    lab.machine(scenario)

    report = run(
        lab.plan("single"), Options(Depth(cuda=False, wait_free_s=0.0), names=("nvml", "busy"))
    )

    assert [result.id for result in report.worst()] == ["gpu.busy"]
