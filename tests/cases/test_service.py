"""Reported faults of a starting or serving engine, by the id of the case.

Where the stand-in engine is needed, the whole service runs over it.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned import plan_of

from appliance.plan.launch_plan import LaunchPlan
from appliance.serve.effective import Effective
from appliance.serve.events import EventLog
from appliance.serve.prerequisites import (
    Reading,
    missing_compiler,
    read_some,
    slow_storage,
    unwritable_cache,
)
from appliance.serve.progress import EngineSample, Health, Progress
from appliance.units import GIB

Start = Callable[..., Any]
INFO = "(EngineCore pid=71) INFO 11-29 19:22:33 [core.py:121] "
SAYS = (
    INFO + "Initializing a V1 LLM engine (v0.27.1) with config: model='{model}', "
    "speculative_config=None, trust_remote_code=False, dtype=torch.{dtype}, max_seq_len={length}, "
    "load_format=safetensors, tensor_parallel_size={tensor}, pipeline_parallel_size=1, "
    "disable_custom_all_reduce={no_own}, quantization={method}, quantization_config=None, "
    "structured_outputs_config=StructuredOutputsConfig(backend='auto', model='x'), "
    "served_model_name=quasar, enable_prefix_caching=True"
)
BACKEND = "(Worker pid=80) INFO 11-29 19:22:41 [cuda.py:422] Using AttentionBackendEnum.{} backend."


@pytest.fixture
def gpu_plan(validate: Callable[..., Any], model: Callable[..., Path]) -> LaunchPlan:
    """The plan of a small model on one V100."""
    return plan_of(validate(model(), "1x16GiB", "--json"))


def says(plan: LaunchPlan, **changes: object) -> str:
    told = {
        "model": plan.model.path,
        "dtype": "float16",
        "length": plan.model.max_model_len,
        "tensor": 1,
        "no_own": True,
        "method": "nvfp4",
    }
    return SAYS.format(**(told | changes))


@pytest.mark.parametrize(
    ("name", "code"), [("CUSTOM", None), ("FLEX_ATTENTION", "BACKEND_MISMATCH"),
                       ("TRITON_ATTN", "BACKEND_MISMATCH")]
)  # fmt: skip
def test_rc_027_backend_in_the_log_must_be_the_planned_one(
    gpu_plan: LaunchPlan, name: str, code: str | None
) -> None:
    told = Effective()
    for line in (says(gpu_plan), "Using HND KV cache layout for FLASH_ATTN backend."):
        told.note(line)
    told.note(BACKEND.format(name))

    found = told.mismatch(gpu_plan)

    assert (found and found.code) == code
    if found is not None:
        assert found.evidence == ("want CUSTOM", f"got {name}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tensor": 2}, "tensor_parallel_size: want 1, got 2"),
        ({"model": "Qwen/Qwen3-0.6B"}, "got Qwen/Qwen3-0.6B"),
        ({"length": 40960}, "max_seq_len: want 4096, got 40960"),
        ({"dtype": "bfloat16"}, "dtype: want torch.float16, got torch.bfloat16"),
        ({"method": "None"}, "quantization: want nvfp4, got None"),
        ({"no_own": False}, "disable_custom_all_reduce: want True, got False"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_rc_050_engine_that_runs_with_other_settings_is_refused_by_the_setting(
    gpu_plan: LaunchPlan, change: dict[str, object], said: str
) -> None:
    told = Effective()
    told.note(says(gpu_plan, **change))

    found = told.mismatch(gpu_plan)

    assert found is not None
    assert found.code == "EFFECTIVE_CONFIG"
    assert len(found.evidence) == 1
    assert said in found.evidence[0]


def test_rc_050_engine_that_says_nothing_or_the_same_is_taken_at_its_word(
    gpu_plan: LaunchPlan,
) -> None:
    told = Effective()
    assert told.mismatch(gpu_plan) is None
    told.note(says(gpu_plan))

    assert told.mismatch(gpu_plan) is None


def test_rc_050_other_settings_end_the_start_with_40(start: Start) -> None:
    line = SAYS.format(
        model="Qwen/Qwen3-0.6B", dtype="float32", length=256, tensor=2, no_own=True, method="None"
    )
    running = start(behave={"log": [line]})

    assert running.wait() == 40
    said = running.log.read_text()
    assert "error[EFFECTIVE_CONFIG] engine" in said
    assert "tensor_parallel_size: want 1, got 2" in said
    assert running.named("serve.ready") == []


def test_rc_048_rc_050_rc_055_inherited_variables_steer_nothing_and_are_named(
    start: Start, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    record = tmp_path / "record.json"
    inherited = {
        "VLLM_PORT": "tcp://10.0.0.1:8000",
        "VLLM_SERVICE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "VLLM_MODEL": "Qwen/Qwen3-0.6B",
        "MODEL": "Qwen/Qwen3-0.6B",
        "TP": "2",
        "HF_HUB_OFFLINE": "0",
    }
    running = start(
        variables=inherited,
        behave={"record": str(record)},
        canary="true, min_decode_rate: 100000",
    )
    running.wait_for("ready", 200)
    seen = json.loads(record.read_text())

    assert set(running.named("engine.environment_dropped")[0]["names"]) >= {
        "VLLM_MODEL",
        "VLLM_PORT",
        "VLLM_SERVICE_PORT_8000_TCP_ADDR",
    }
    assert running.named("environment.ignored")[0]["names"] == ["MODEL", "TP"]
    assert not {"VLLM_PORT", "VLLM_MODEL"} & seen["environ"].keys()
    assert (seen["environ"]["HF_HUB_OFFLINE"], seen["environ"]["TRANSFORMERS_OFFLINE"]) == (
        "1",
        "1",
    )
    assert f"--model={tiny_checkpoint}" in seen["argv"]
    assert f"--port={running.port}" in seen["argv"]
    assert [event["code"] for event in running.named("engine.slow")] == ["SLOW_BACKEND"]


WALLED = """
import sys

def wall(event, arguments):
    if event.partition(".")[0] == "socket" and event != "socket.__new__":
        raise SystemExit(f"network: {event} {arguments}")

sys.addaudithook(wall)
from appliance.cli import main
options = ["--config", sys.argv[1], "--assume", "1x16GiB"]
for words in (["validate", *options], ["plan", *options], ["render", *options],
              ["model", "inspect", sys.argv[2]]):
    if main(words):
        raise SystemExit(f"failed: {words}")
"""


def test_rc_055_no_verb_but_fetch_looks_for_a_network(
    file: Callable[..., Path], tiny_checkpoint: Path
) -> None:
    words = (sys.executable, "-c", WALLED, str(file(tiny_checkpoint)), str(tiny_checkpoint))
    done = subprocess.run(words, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "architecture" in done.stdout, "the last verb ran too"


def test_rc_056_chat_that_is_refused_ends_the_start_with_40(start: Start) -> None:
    running = start(behave={"chat_status": 400})

    assert running.wait() == 40
    assert "error[CHAT_REFUSED] " in running.log.read_text()
    assert running.named("serve.ready") == []


def test_rc_041_prefill_below_the_stall_time_never_fails_and_its_end_clears_everything() -> None:
    progress = Progress(120.0, now=0.0)
    prefill = EngineSample(work=5.0, requests=2.0)
    seen: set[Health] = set()
    for now in range(0, 119, 5):
        progress.scraped(prefill, in_flight=2, now=float(now))
        if progress.canary_due(float(now)):
            progress.canary_sent(float(now))
            progress.canary_done(answered=False, now=now + 2.0)
        seen.add(progress.health(float(now))[0])

    progress.scraped(replace(prefill, work=2053.0), in_flight=2, now=119.0)

    assert seen == {Health.MOVING, Health.SUSPECT}  # live holds, ready waits
    assert progress.health(170.0)[0] is Health.MOVING


def test_rc_059_bench_puts_layouts_side_by_side_and_names_the_best(
    start: Start, appliance: Callable[..., Any], tmp_path: Path
) -> None:
    running = start()
    running.wait_for("ready", 200)
    sizes = ("--prompt-tokens", "64", "--answer-tokens", "12", "--at-once", "2")
    slow, fast = tmp_path / "tensor.json", tmp_path / "new/single.json"

    def bench(label: str, token_s: float, *words: str | Path) -> Any:
        running.behave(token_s=token_s)
        url = f"http://127.0.0.1:{running.port}"
        return appliance("bench", "--url", url, "--label", label, *sizes, *words)

    assert bench("tensor", 0.1, "--out", slow).code == 0
    both = bench("single", 0.001, "--out", fast, "--against", slow)
    worse = bench("tensor", 0.1, "--baseline", fast)

    assert both.code == 0, both.err
    assert [line.split()[0] for line in both.out.splitlines()[1:]] == ["tensor", "single", "best"]
    assert both.out.splitlines()[-1].split() == ["best", "single", "single", "single"]
    assert worse.code == 60
    assert set(worse.codes) == {"BENCH_REGRESSION"}
    assert "decode_rate: at least " in worse.err


def test_rc_059_bench_of_other_loads_or_without_a_server_says_so(
    appliance: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "junk.json").write_text('{"format": 1, "label": "x"}')

    nobody = appliance("bench", "--url", "http://127.0.0.1:1")
    junk = appliance("bench", "--url", "http://127.0.0.1:1", "--against", tmp_path / "junk.json")

    assert (nobody.code, nobody.codes) == (41, ["BENCH_SERVER"])
    assert (junk.code, junk.codes) == (2, ["BENCH_INPUT"])


def log_of() -> tuple[EventLog, io.StringIO]:
    stream = io.StringIO()
    return EventLog("text", "info", stream=stream), stream


@pytest.mark.parametrize(("rate_mib", "is_refused"), [(50, False), (5, True)])
def test_rc_052_storage_that_cannot_load_in_time_is_refused_with_estimate_and_key(
    gpu_plan: LaunchPlan, rate_mib: int, is_refused: bool
) -> None:
    log, stream = log_of()
    reading = Reading(read=GIB, seconds=1024 / rate_mib, total=17 * GIB)

    fault = slow_storage(gpu_plan, log, lambda _path: reading)

    assert f"load_s={round(17 * 1024 / rate_mib)}" in stream.getvalue()
    assert (fault is not None) is is_refused
    if fault is not None:
        assert "error[SLOW_STORAGE]" in str(fault)
        assert "budget=1800 s, got est=3482 s for 17.00 GiB at 5.00 MiB/s" in str(fault)
        assert "raise startup.timeout" in str(fault)


def test_rc_052_rate_is_that_of_the_first_part_or_of_what_ten_seconds_give(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(24 * 1024**2))
    ticks = iter(range(100))

    part = read_some(tmp_path, limit=16 * 1024**2)
    slow = read_some(tmp_path, limit_s=3.0, clock=lambda: float(next(ticks)))

    assert (part.read, part.total) == (16 * 1024**2, 48 * 1024**2)
    assert 8 * 1024**2 <= slow.read < slow.total
    assert slow.load_s == pytest.approx(slow.total * slow.seconds / slow.read)


@pytest.mark.parametrize("text", ["", "#!/bin/sh\necho 'fatal error: Python.h' >&2\nexit 1\n"])
def test_rc_057_compiler_that_is_absent_or_lacks_its_headers_is_named(
    tmp_path: Path, text: str
) -> None:
    compiler = tmp_path / "cc"
    if text:
        compiler.write_text(text)
        compiler.chmod(0o755)

    fault = missing_compiler({"CC": str(compiler)})

    assert fault is not None
    assert "error[NO_CC] Triton" in str(fault)
    assert ("Python.h" if text else "no ") in str(fault)
    compiler.write_text("#!/bin/sh\nexec grep -q 'include <Python.h>'\n")
    compiler.chmod(0o755)
    assert missing_compiler({"CC": str(compiler)}) is None


@pytest.mark.parametrize("name", ["VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"])
def test_rc_058_cache_that_takes_no_file_is_named_by_its_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    places = {"VLLM_CACHE_ROOT": str(tmp_path / "vllm"), name: str(tmp_path / "file/cache")}

    fault = unwritable_cache(places)

    assert fault is not None
    assert f"error[CACHE_NOT_WRITABLE] path={tmp_path}/file/cache" in str(fault)
    assert unwritable_cache({"VLLM_CACHE_ROOT": str(tmp_path / "vllm")}) is None
    assert list((tmp_path / "vllm").iterdir()) == []


def test_rc_058_cache_that_takes_no_file_ends_the_start_with_12(start: Start) -> None:
    running = start(variables={"VLLM_CACHE_ROOT": "/proc/cache"})

    assert running.wait() == 12
    assert "error[CACHE_NOT_WRITABLE] path=/proc/cache" in running.log.read_text()
    assert running.named("engine.start") == []
