"""Runs the real engine on this machine's NVIDIA GPUs: `python3 tests/gpu/run_engine.py`.

Needs torch with CUDA, vLLM's Python of the image (no extension) with what it imports, and both
kernel libraries; --packages names a folder that holds what is not installed, --appliance one that
holds another copy of the appliance. Models are made here; --model adds a checkpoint with its twin
as NAME=FOLDER. Writes engine.json into $OUT (default: the current folder); exit 0 when every answer
agrees: wherever an engine's greedy token is not that of the dequantized FP32 twin, the twin sees
both within 0.05 of each other in log-probability, and the engine's own log-probabilities are within
0.05 of the twin's (engine_faults.py). The twin may break ties between two experts the other way
(engine_twin.py): each such tie is named in the result.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve()
REPOSITORY = SCRIPT.parents[2]
TOKENS = 48
ENVIRONMENT = {
    "VLLM_PLUGINS": "nvfp4",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "CUDA_CACHE_MAXSIZE": str(1 << 30),
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "3",
}

EAGER = {"name": "eager"}
GRAPHS = {
    "name": "graphs, prefix cache, chunks of 64",
    "graphs": True,
    "prefix_caching": True,
    "step_tokens": 64,
}
DEQUANTIZED = {"name": "dequantized", "weights": "dequantized"}
CUSTOM = {"attention": "CUSTOM"}
OURS = [
    {"name": "CUSTOM, eager", **CUSTOM},
    GRAPHS | {"name": "CUSTOM, graphs, prefix cache, chunks of 64", "requests": 1000, **CUSTOM},
]
TIMED = [
    {"name": "graphs", "graphs": True},
    {"name": "dequantized, graphs", "graphs": True, "weights": "dequantized"},
]
"""Steps of nothing but decodes, for the table of times."""
UPSTREAM = {
    "name": "upstream's emulation, graphs",
    "graphs": True,
    "quantization": "compressed-tensors",
    "linear_backend": "emulation",
    "folder": "upstream",
    "coarse": True,
}
"""The only NVFP4 route of upstream that needs no extension: dequantize, then torch's product."""
STEPS = [way | {"name": f"CUSTOM, {way['name']}", **CUSTOM} for way in [*TIMED, UPSTREAM]]
"""With the appliance's attention, one engine at a time: our products, torch's FP16, upstream's."""
PLAIN = {"name": "CUSTOM, of 16 bits", "folder": "twin", "quantization": None, **CUSTOM}
"""The dequantized checkpoint itself, as one that was never quantized."""
PAIRS = [
    {"name": "tensor parallel 2", "tp": 2, "graphs": True},
    {"name": "pipeline parallel 2", "pp": 2, "graphs": True},
]


def jobs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every model with the ways to run it."""
    given = dict(entry.split("=", 1) for entry in options.model)
    if options.steps:
        timed = [{"name": name, "ways": STEPS, "folder": path} for name, path in given.items()]
        return [{"name": "stack", "ways": STEPS}, *timed]
    ways = [EAGER, GRAPHS, *(OURS if options.custom else [])]
    if options.pair:
        ways = [{"name": "one card", "graphs": True}, *PAIRS]
    made = {
        "dense": [*ways, DEQUANTIZED, PLAIN] if not options.pair else ways,
        "moe": [*ways, DEQUANTIZED] if not options.pair else ways,
        "mixed": [EAGER, GRAPHS | CUSTOM] if not options.pair else [],
        "hybrid": [*ways, DEQUANTIZED] if not options.pair else ways,
    }
    if options.formats:
        from engine_models import FORMATS  # noqa: PLC0415 - beside this script

        made |= {name: [EAGER, GRAPHS | CUSTOM] for name in FORMATS}
    if options.long:
        whole = {"name": "chunks of 8192", "step_tokens": 8192}
        made["long"] = [
            {"name": "chunks of 2048"},
            *([CUSTOM | {"name": "CUSTOM, chunks of 2048"}] if options.custom else []),
            whole | CUSTOM if options.custom else whole,
        ]
    wanted = {name: ways for name, ways in made.items() if ways}
    if options.only:
        if unknown := set(options.only) - set(wanted) - set(given):
            raise SystemExit(
                f"--only: {', '.join(sorted(wanted))}; got {', '.join(sorted(unknown))}"
            )
        wanted = {name: ways for name, ways in wanted.items() if name in options.only}
    return [{"name": name, "ways": ways} for name, ways in wanted.items()] + [
        {"name": name, "ways": ways + ([] if options.pair else TIMED), "folder": folder}
        for name, folder in given.items()
    ]


def prepare(job: dict[str, Any], work: Path) -> dict[str, Any]:
    """Make the model and the prompts of a job."""
    import engine_upstream  # noqa: PLC0415 - beside this script
    from engine_models import LONG, make, make_twin, prompts  # noqa: PLC0415 - likewise

    root = Path(job.pop("folder", work / job["name"]))
    if not (root / "model").is_dir():
        make(job["name"], root)
    if not (root / "twin").is_dir() and job["name"] != "stack":
        make_twin(root)  # the twin of the stack would take minutes: its ways judge each other
    folders = {way.get("folder") for way in job["ways"]}
    if "upstream" in folders and not (root / "upstream").is_dir():
        engine_upstream.write(root / "model", root / "upstream")
    config = json.loads((root / "model" / "config.json").read_text())
    config = config.get("text_config", config)
    is_long = job["name"] == "long"
    asked = prompts(config["vocab_size"])
    if is_long:
        asked = [prompts(config["vocab_size"], 2 * count)[3] for count in (4096, 32_768)]
    if (root / "prompts.json").is_file():
        asked = json.loads((root / "prompts.json").read_text())
    twin = root / "twin"
    return job | {
        "model": str(root / "model"),
        "twin": str(twin) if twin.is_dir() and not is_long else None,
        "prompts": asked,
        "tokens": 8 if is_long else TOKENS,
        "max_model_len": LONG if is_long else 512,
        "recurrent": "linear_attention" in config.get("layer_types", ()),
    }


def environment(options: argparse.Namespace, work: Path) -> dict[str, str]:
    """The child's environment: where packages are, and that the plugin is one."""
    known = work / "known" / "appliance-0.1.0.dist-info"
    known.mkdir(parents=True, exist_ok=True)
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: appliance\nVersion: 0.1.0\n")
    entry = "[vllm.general_plugins]\nnvfp4 = appliance.vllm_plugin:register\n"
    (known / "entry_points.txt").write_text(entry)
    paths = [known.parent, *options.packages, options.appliance, SCRIPT.parent]
    joined = os.pathsep.join(str(Path(path).resolve()) for path in paths)
    return os.environ | ENVIRONMENT | {"PYTHONPATH": joined}


def start(
    words: list[str], name: str, work: Path, env: dict[str, str]
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start one child with a log and a Triton cache of its own."""
    log = work / f"{name}.log"
    own = env | {
        "TRITON_CACHE_DIR": str(work / f"triton-{name}"),
        "VLLM_CACHE_ROOT": str(work / f"vllm-{name}"),
    }
    with log.open("wb") as sink:
        child = subprocess.Popen(
            [sys.executable, *words], stdout=sink, stderr=subprocess.STDOUT, env=own
        )
    return child, log


def run_jobs(
    prepared: list[dict[str, Any]], work: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Run the jobs side by side, or with two GPUs one after the other, within the time limit."""
    env, deadline = environment(options, work), time.monotonic() + options.limit
    running, results = [], {}
    commands = {
        job["name"]: [str(SCRIPT.parent / "engine_child.py"), str(work / f"{job['name']}.json")]
        for job in prepared
    }
    for job in prepared:
        (work / f"{job['name']}.json").write_text(json.dumps(job))
    if options.checks:
        commands = {"operations": [str(SCRIPT.parent / "engine_checks.py")], **commands}
    for name, words in commands.items():
        result = work / f"{name}-result.json"
        alone = (
            {} if name == "operations" or options.pair else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        )
        child, log = start([*words, str(result)], name, work, env | alone)
        running.append((name, child, log, result))
        if options.steps:  # a time is taken on a GPU that does nothing else
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(1.0, deadline - time.monotonic()))
    for name, child, log, result in running:
        try:
            child.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
        found = json.loads(result.read_text()) if result.is_file() else {}
        results[name] = found | {"exit": child.wait(), "log": log.read_text(errors="replace")}
    return results


def apart(first: dict[str, Any], other: dict[str, Any]) -> float | None:
    """The largest difference of log-probabilities between answers that are the same."""
    answers = zip(*(way.get("tokens", ()) for way in (first, other)), strict=False)
    said = zip(*(way.get("logprobs", ()) for way in (first, other)), strict=False)
    pairs = [
        abs(a - b)
        for (one, two), (mine, yours) in zip(answers, said, strict=False)
        if one == two
        for a, b in zip(mine, yours, strict=True)
    ]
    return max(pairs, default=None)


def agreement(found: dict[str, Any], *, timed: bool = True) -> dict[str, Any]:
    """Compare every way with the first one, prompt by prompt; times only of what is right."""
    ways = found.get("ways", {})
    first_way = next(iter(ways.values()), {})
    first = first_way.get("one", {}).get("tokens", [])
    lines: dict[str, Any] = {}
    for name, way in ways.items():
        line: dict[str, Any] = {k: way[k] for k in ("error", "start_s", "wall_s") if k in way}
        for batch in ("one", "sixteen"):
            answers = way.get(batch, {}).get("tokens", [])
            equal = [answer == first[index % len(first)] for index, answer in enumerate(answers)]
            line[batch] = f"{sum(equal)}/{len(equal)} equal"
            line[f"{batch}_logprobs_apart"] = apart(first_way.get(batch, {}), way.get(batch, {}))
            seconds = way.get(batch, {}).get("seconds")
            if seconds is not None and answers and timed:
                steps = sum(map(len, answers)) if batch == "one" else len(answers[0])
                line[f"{batch}_ms_a_step"] = round(1000 * seconds / steps, 2)
        line |= {key: way[key] for key in ("growth_bytes", "calls") if way.get(key) is not None}
        lines[name] = line
    return {"ways": lines, "twin": found.get("twin"), "triton": found.get("triton")}


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What it ran on, and with which library."""
    import torch  # noqa: PLC0415 - the children are started first

    library = Path(options.appliance) / "appliance" / "lib" / "libnvfp4_sm70.so"
    return {
        "gpus": [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "libnvfp4_sm70.so": hashlib.sha256(library.read_bytes()).hexdigest(),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", action="append", default=[], help="folder of packages")
    parser.add_argument("--appliance", default=str(REPOSITORY), help="folder of `appliance`")
    parser.add_argument("--model", action="append", default=[], help="NAME=FOLDER")
    parser.add_argument("--only", nargs="*", help="of all models, these")
    parser.add_argument("--formats", action="store_true", help="also FP8, 16-bit experts, g128")
    parser.add_argument("--pair", action="store_true", help="two GPUs: one card, TP=2, PP=2")
    parser.add_argument("--custom", action="store_true", help="also the appliance's attention")
    parser.add_argument("--steps", action="store_true", help="only times: the stack and --model's")
    parser.add_argument("--long", action="store_true", help="also prompts of 4096 and 32768 tokens")
    parser.add_argument("--checks", action="store_true", help="also the operations alone")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for everything")
    parser.add_argument("--work", default="build/engine", help="folder for models and logs")
    return parser.parse_args()


def main() -> int:
    """Run, write the result, return 0 when everything agrees."""
    options = parse()
    work, out = Path(options.work).resolve(), Path(os.environ.get("OUT", "."))
    work.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(SCRIPT.parent))
    started = time.monotonic()
    prepared = [prepare(job, work) for job in jobs(options)]
    results = run_jobs(prepared, work, options)
    from engine_faults import faults  # noqa: PLC0415 - beside this script

    wrong = faults(results)
    report = {
        "command": " ".join(["python3", "tests/gpu/run_engine.py", *sys.argv[1:]]),
        "seconds": round(time.monotonic() - started, 1),
        "machine": machine(options),
        "models": {
            name: agreement(found, timed=not any(line.startswith(name) for line in wrong))
            for name, found in results.items()
            if name != "operations"
        },
        "operations": {k: v for k, v in results.get("operations", {}).items() if k != "log"},
        "wrong": wrong,
    }
    (out / "engine.json").write_text(json.dumps(report, indent=1) + "\n")
    for name, found in results.items():
        (out / f"{name}.log").write_text(found["log"][-200_000:])
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
