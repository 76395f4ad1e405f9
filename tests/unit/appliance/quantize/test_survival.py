"""The command in a process of its own: killed, out of room, in each other's way."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]
Tree = Callable[[Path], dict[str, bytes]]


def start(source: Path, target: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "appliance", "quantize", str(source), str(target)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)


def test_quantize_killed_after_a_shard_goes_on_and_ends_with_the_same_bits(
    sharded_llama: Any, tmp_path: Path, cli: Cli, read_tree: Tree
) -> None:
    source = sharded_llama.write(tmp_path / "src")
    whole = cli("quantize", source, tmp_path / "whole")
    process = start(source, tmp_path / "dst")
    assert process.stderr is not None
    process.stderr.readline()  # the first shard is finished
    kill(process)
    assert not (tmp_path / "dst").exists()

    resumed = cli("quantize", source, tmp_path / "dst")

    assert (whole.returncode, resumed.returncode) == (0, 0)
    assert "resumed=true" in resumed.stderr
    assert read_tree(tmp_path / "dst") == read_tree(tmp_path / "whole")
    assert not (tmp_path / "dst.part").exists()


@pytest.mark.slow
def test_quantize_killed_at_any_moment_leaves_all_or_nothing(
    sharded_llama: Any, tmp_path: Path, cli: Cli, read_tree: Tree
) -> None:
    source = sharded_llama.write(tmp_path / "src")
    begun = time.monotonic()
    assert cli("quantize", source, tmp_path / "whole").returncode == 0
    length = time.monotonic() - begun
    expected = read_tree(tmp_path / "whole")

    for step in range(8):
        target = tmp_path / f"dst{step}"
        process = start(source, target)
        time.sleep(length * (0.4 + 0.08 * step))
        kill(process)
        if target.exists():
            assert read_tree(target) == expected
        assert cli("quantize", source, target).returncode == 0
        assert read_tree(target) == expected
        assert not target.with_name(target.name + ".part").exists()


@pytest.mark.slow
def test_quantize_killed_before_any_step_leaves_all_or_nothing_and_a_rerun_finishes(
    llama: Any, tmp_path: Path, cli: Cli, read_tree: Tree
) -> None:
    source = llama.write(tmp_path / "src")
    script = Path(__file__).parents[1] / "kill_at.py"

    def killed(at: int, target: Path) -> subprocess.CompletedProcess[str]:
        words = (str(at), str(target), "quantize", str(source), str(target), "--threads", "1")
        return subprocess.run(
            (sys.executable, str(script), *words), capture_output=True, text=True, check=False
        )

    whole = killed(0, tmp_path / "whole")
    events = int(whole.stderr.rpartition("events=")[2])
    expected = read_tree(tmp_path / "whole")

    for at in range(3, events + 1, 6):
        target = tmp_path / f"dst{at}"
        assert killed(at, target).returncode == -signal.SIGKILL
        if target.exists():
            assert expected.items() <= read_tree(target).items()  # the lock file may be left
        assert cli("quantize", source, target).returncode == 0
        assert expected.items() <= read_tree(target).items()


def test_quantize_without_room_says_so_once_and_a_rerun_finishes(
    sharded_llama: Any, tmp_path: Path, cli: Cli, read_tree: Tree
) -> None:
    source = sharded_llama.write(tmp_path / "src")
    assert cli("quantize", source, tmp_path / "whole").returncode == 0
    largest = max(path.stat().st_size for path in (tmp_path / "whole").glob("*.safetensors"))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, largest - 1))

    failed = cli("quantize", source, tmp_path / "dst", preexec_fn=limit)

    errors = [line for line in failed.stderr.splitlines() if line.startswith("error[")]
    assert failed.returncode == 12
    assert len(errors) == 1
    assert errors[0].startswith("error[DISK_FULL]")
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "dst").exists()
    assert not list((tmp_path / "dst.part").glob("*.safetensors.part"))
    assert cli("quantize", source, tmp_path / "dst").returncode == 0
    assert read_tree(tmp_path / "dst") == read_tree(tmp_path / "whole")


def test_quantize_onto_a_full_file_system_is_refused_before_it_writes(
    sharded_llama: Any, tmp_path: Path
) -> None:
    source = sharded_llama.write(tmp_path / "src")
    mounted = tmp_path / "small"
    mounted.mkdir()
    script = (
        f"mount -t tmpfs -o size=1m none {mounted} || exit 99; "
        f"{sys.executable} -m appliance quantize {source} {mounted}/dst; echo rc=$?; ls {mounted}"
    )
    unshare = ["unshare", "--mount", "--user", "--map-root-user"]
    words = [*unshare, "sh", "-c", script]

    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)

    if "rc=" not in done.stdout:
        pytest.skip("no user namespaces: a tmpfs cannot be mounted")
    assert "rc=12" in done.stdout
    assert done.stderr.count("error[DISK_FULL]") == 1
    assert "dst.part" in done.stdout
    assert "dst\n" not in done.stdout


def test_quantize_while_another_run_writes_the_same_output_is_refused(
    sharded_llama: Any, tmp_path: Path, cli: Cli
) -> None:
    source = sharded_llama.write(tmp_path / "src")
    process = start(source, tmp_path / "dst")
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGSTOP)

    second = cli("quantize", source, tmp_path / "dst")

    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=60)
    assert second.returncode == 2
    assert second.stderr.startswith("error[OUTPUT_BUSY]")
    assert process.returncode == 0


def test_quantize_onto_a_file_in_the_way_is_refused(llama: Any, tmp_path: Path, cli: Cli) -> None:
    source = llama.write(tmp_path / "src")
    (tmp_path / "file").write_text("")

    done = cli("quantize", source, tmp_path / "file/dst")

    assert done.returncode == 12
    assert done.stderr.startswith("error[OUTPUT_UNWRITABLE]")


def test_quantize_prints_one_summary_line_and_events_on_stderr(
    sharded_llama: Any, tmp_path: Path, cli: Cli
) -> None:
    source = sharded_llama.write(tmp_path / "src")

    done = cli("quantize", source, tmp_path / "dst", "--threads", "1")

    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith("quantized 3.9 M weights in 42 matrices")
    assert [line.split()[:2] for line in done.stderr.splitlines()] == [
        ["INFO", "quantize.shard"]
    ] * 6


def test_quantize_with_json_prints_the_report(llama: Any, tmp_path: Path, cli: Cli) -> None:
    source = llama.write(tmp_path / "src")

    done = cli("quantize", source, tmp_path / "dst", "--json", "--mode", "rtn")

    assert json.loads(done.stdout)["mode"] == "rtn"


@pytest.mark.parametrize(
    "words",
    [("--threads", "0"), ("--mode", "best"), ("--error-limit", "1.5"), ("--error-limit", "nan")],
)
def test_quantize_with_a_bad_option_is_a_usage_error(
    tmp_path: Path, cli: Cli, words: tuple[str, str]
) -> None:
    done = cli("quantize", tmp_path, tmp_path / "dst", *words)

    assert done.returncode == 2
    assert not (tmp_path / "dst.part").exists()


@pytest.mark.slow
def test_quantize_needs_little_more_memory_than_its_largest_tensor(
    llama: Any, tmp_path: Path
) -> None:
    # 6 matrices of 32 MiB in one file: a run that held the file or its output would need 54 to
    # 190 MiB more. VmHWM, since ru_maxrss starts with what the parent had.
    rng = np.random.default_rng(0)
    inner = llama.config["intermediate_size"] = 1 << 18
    for layer in range(2):
        for leaf, shape in (("gate", (inner, 64)), ("up", (inner, 64)), ("down", (64, inner))):
            name = f"model.layers.{layer}.mlp.{leaf}_proj.weight"
            llama.tensors[name] = rng.standard_normal(shape, np.float32)
    source = llama.write(tmp_path / "src")
    script = (
        "import pathlib, sys; from appliance.cli import main; rc = main(sys.argv[1:]);"
        "print(pathlib.Path('/proc/self/status').read_text()); sys.exit(rc)"
    )
    words = [sys.executable, "-c", script, "quantize", str(source), str(tmp_path / "dst")]

    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)

    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", done.stdout)
    assert int(peak_kib) / 1024 < 150
