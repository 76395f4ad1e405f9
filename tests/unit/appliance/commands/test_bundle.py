"""`appliance bundle`: never a secret, never an end for want of a part."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Ended

from healthchecks.state_file import StateFile

Appliance = Callable[..., Ended]
Configure = Callable[[str], Path]

KEY = "team-a-3f9c1b77d2"
HF_TOKEN = "hf_" + "Ab1" * 10
BEARER = "d41d8cd98f00b204"
PROXY = "https://proxy-user:proxy-pass-77@proxy.example:3128"
SECRETS = (KEY, HF_TOKEN, BEARER, "proxy-pass-77", "comment-secret-5512", "0321918273645")


def inside(path: Path) -> dict[str, bytes]:
    """Return every file of an archive, in order; what the manifest says of each is right."""
    found: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.removeprefix("appliance-bundle/")] = file.read()
    manifest = json.loads(found["MANIFEST.json"])
    for part in manifest["files"]:
        content = found[part["path"]]
        assert part["bytes"] == len(content)
        assert part["sha256"] == hashlib.sha256(content).hexdigest()
    assert ["MANIFEST.json", *(part["path"] for part in manifest["files"])] == list(found)
    return found


def missing(found: dict[str, bytes]) -> dict[str, str]:
    manifest = json.loads(found["MANIFEST.json"])
    return {part["path"]: part["reason"] for part in manifest["missing"]}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


@pytest.fixture
def served(configure: Configure, state: Path, tmp_path: Path) -> Path:
    """A configuration for the CPU engine with everything secret around it, and a run that ended."""
    (tmp_path / "keys").write_text(f"{KEY}\n")
    config = configure(
        f"# api_key: comment-secret-5512\n"
        f"execution: {{device: cpu}}\nmemory: {{kv_cache_size: 1GiB}}\n"
        f"gate: {{state_dir: {state}}}\n"
        f"server: {{api_keys_file: {tmp_path}/keys, admin_port: 9}}\n"
    )
    last = {
        "at": time.time(),
        "exit_code": 41,
        "code": "ENGINE_DIED",
        "message": f"error[ENGINE_DIED] engine: got {HF_TOKEN}; see {PROXY}.",
        "returncode": 1,
        "lines": [
            f"INFO headers: Authorization: Bearer {KEY}",
            f"non-default args: {{'api_key': ['{BEARER}'], 'model': '/models/x'}}",
            "RuntimeError: CUDA error: an illegal memory access was encountered",
        ],
    }
    (state / "last_run.json").write_text(json.dumps(last))
    (state / "serve.json").write_text('{"ends": [], "running": null, "refusal": null}')
    gpu = {"GPU-1": {"serial": "0321918273645", "latched": ["ecc"]}}
    (state / "state.json").write_text(json.dumps({"schema_version": "1", "gpus": gpu}))
    (state / "audit.log").write_text(f'{{"event": "ack", "reason": "token={BEARER}"}}\n')
    run = state / "run"
    run.mkdir()
    (run / "handoff.json").write_text(json.dumps({"token": KEY}))
    return config


@pytest.mark.usefixtures("served")
def test_bundle_of_a_stopped_appliance_has_every_part_and_no_secret(
    appliance: Appliance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", HF_TOKEN)
    monkeypatch.setenv("HTTPS_PROXY", PROXY)
    monkeypatch.setenv("OPENAI_API_KEY", BEARER)
    before = sorted((path, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file())

    ended = appliance("bundle", "-o", "b.tar.gz", "--json")

    assert ended.code == 0, ended.err
    found = inside(Path("b.tar.gz"))
    whole = b"\n".join([*found.values(), ended.out.encode()]) + "\n".join(found).encode()
    assert [secret for secret in SECRETS if secret.encode() in whole] == []
    assert list(found) == [
        "MANIFEST.json",
        "versions.json",
        "config.json",
        "plan.json",
        "render.json",
        "gate.json",
        "machine.json",
        "state/serve.json",
        "state/last_run.json",
        "state/state.json",
        "state/audit.log",
        "log.txt",
        "doctor.json",
    ]
    assert json.loads(ended.out) == json.loads(found["MANIFEST.json"])
    assert list(missing(found)) == [
        "status.json",
        "running_plan.json",
        "metrics.txt",
        "state/HOST_ACTION_REQUIRED",
    ]
    Path("b.tar.gz").unlink()
    after = sorted((path, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file())
    assert after == before, "the bundle changed what it tells of"


def test_parts_are_what_the_verbs_say(appliance: Appliance, served: Path, state: Path) -> None:
    assert appliance("bundle", "-o", "b.tar.gz").code == 0
    found = inside(Path("b.tar.gz"))
    parts: dict[str, Any] = {
        name: json.loads(content) for name, content in found.items() if name.endswith(".json")
    }
    plan = json.loads(appliance("plan", "--json").out)
    rendered = json.loads(appliance("render", "--json").out)
    diagnosis = json.loads(appliance("doctor", "--state-dir", state, "--json").out)

    assert parts["plan.json"] == plan
    assert parts["render.json"]["command"] == rendered["command"]
    assert parts["render.json"]["argv"] == rendered["argv"]
    assert parts["render.json"]["environment"] == rendered["environment"]
    assert parts["doctor.json"]["code"] == diagnosis["code"] == "ILLEGAL_ACCESS"
    assert parts["config.json"]["sha256"] == hashlib.sha256(served.read_bytes()).hexdigest()
    values = parts["config.json"]["values"]
    assert values["server"]["api_keys_file"].endswith("/keys")
    assert values["memory"]["max_num_batched_tokens"] == 2048
    assert parts["machine.json"]["schema"] == "appliance-machine-state/1"
    assert parts["gate.json"]["verdict"] == "pass"
    assert parts["versions.json"]["python"] == sys.version
    assert parts["versions.json"]["kernel"] == os.uname().release
    assert "illegal memory access" in found["log.txt"].decode()


def test_bundle_of_a_machine_without_anything(appliance: Appliance, tmp_path: Path) -> None:
    ended = appliance("bundle", "--config", tmp_path / "none.yaml", "--state-dir", tmp_path / "no")

    assert ended.code == 0, ended.err
    (archive,) = Path().glob("appliance-bundle-*.tar.gz")
    found = inside(archive)
    assert json.loads(found["config.json"])["faults"][0]["code"] == "CONFIG_FILE"
    reasons = missing(found)
    assert reasons["plan.json"] == "the configuration is invalid, see config.json"
    assert reasons["state/serve.json"].endswith("No such file or directory")
    assert "not had: the configuration is invalid" in ended.out
    assert not (tmp_path / "no").exists(), "the bundle made a state directory"


def test_faulty_configuration_is_told_without_the_secret_in_it(
    appliance: Appliance, configure: Configure, state: Path
) -> None:
    configure(
        f"gate: {{state_dir: {state}}}\nexecution: {{extra_args: {{api_key: {KEY}, dtype: x}}}}\n"
        f"server: {{port: {BEARER}, hf_token: {BEARER}}}\n"
    )

    assert appliance("bundle", "-o", "b.tar.gz").code == 0

    found = inside(Path("b.tar.gz"))
    whole = b"\n".join(found.values()).decode()
    assert KEY not in whole
    assert BEARER not in whole
    config = json.loads(found["config.json"])
    assert {"FLAG_OWNED", "CONFIG_UNKNOWN_KEY"} <= {fault["code"] for fault in config["faults"]}
    assert config["read"]["execution"]["extra_args"] == {"api_key": "[removed]", "dtype": "x"}
    assert f"{state}/serve.json" in missing(found)["state/serve.json"]


@pytest.mark.usefixtures("served")
def test_state_that_cannot_be_read_is_an_entry(
    appliance: Appliance, state: Path, tmp_path: Path
) -> None:
    for name in ("serve.json", "last_run.json", "state.json", "audit.log"):
        (state / name).unlink()
    (state / "serve.json").mkdir()
    os.mkfifo(state / "last_run.json")
    (state / "state.json").write_text("{" + f'"HF_TOKEN": "{HF_TOKEN}"')
    (state / "audit.log").symlink_to(tmp_path / "keys")
    (state / "serve.bad").write_text("half")

    assert appliance("bundle", "-o", "b.tar.gz").code == 0

    found = inside(Path("b.tar.gz"))
    reasons = missing(found)
    assert "not a plain file" in reasons["state/last_run.json"]
    assert "symbolic link" in reasons["state/audit.log"]
    assert "state/serve.json" in reasons
    assert {"log.txt", "doctor.json"} <= set(reasons)
    assert found["state/state.json"] == b'{"HF_TOKEN": "[removed]"'
    assert found["state/serve.bad"] == b"half"
    assert KEY.encode() not in b"".join(found.values())


def test_host_that_needs_help_is_not_measured(
    appliance: Appliance, configure: Configure, state: Path
) -> None:
    configure(f"gate: {{state_dir: {state}}}\n")
    StateFile(state).require_action("process 7 hangs in the driver", None)

    assert appliance("bundle", "-o", "b.tar.gz", "--assume", "2x16GiB").code == 0

    found = inside(Path("b.tar.gz"))
    report = json.loads(found["gate.json"])
    assert report["verdict"] == "fail"
    assert "hangs in the driver" in found["state/HOST_ACTION_REQUIRED"].decode()
    assert json.loads(found["machine.json"])["facts"]["gpus"] == []


@pytest.mark.usefixtures("served")
def test_named_log_is_bounded_cleaned_and_diagnosed(appliance: Appliance, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    noise = f"INFO GET /v1/models authorization: Bearer {KEY}\n" * 60_000
    log.write_text(noise + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")

    began = time.monotonic()
    assert appliance("bundle", "-o", "b.tar.gz", "--log", log).code == 0
    took_s = time.monotonic() - began

    found = inside(Path("b.tar.gz"))
    assert KEY.encode() not in found["log.txt"]
    assert 1_000_000 < len(found["log.txt"]) <= 2 * 1024**2
    said = json.loads(appliance("doctor", "--log", log, "--json").out)
    assert json.loads(found["doctor.json"])["code"] == said["code"]
    manifest = json.loads(found["MANIFEST.json"])
    (entry,) = [part for part in manifest["files"] if part["path"] == "log.txt"]
    assert entry["left_out_bytes"] >= log.stat().st_size - 2 * 1024**2
    assert took_s < 30


@pytest.mark.usefixtures("served")
def test_bundle_is_not_written_over_another_without_force(appliance: Appliance) -> None:
    Path("b.tar.gz").write_text("old")

    refused = appliance("bundle", "--output", "b.tar.gz", "--json")

    assert (refused.code, refused.codes) == (2, ["OUTPUT_EXISTS"])
    assert json.loads(refused.out)["faults"][0]["code"] == "OUTPUT_EXISTS"
    assert Path("b.tar.gz").read_text() == "old"
    assert appliance("bundle", "--output", "b.tar.gz", "--force").code == 0
    assert Path("b.tar.gz").stat().st_mode & 0o777 == 0o600
    assert inside(Path("b.tar.gz"))


@pytest.mark.usefixtures("served")
def test_full_disk_ends_in_12_and_leaves_nothing() -> None:
    done = subprocess.run(
        (sys.executable, "-m", "appliance", "bundle", "--output", "b.tar.gz"),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )

    assert done.returncode == 12
    assert done.stderr.startswith("error[DISK_FULL] b.tar.gz: the bundle must fit, got ")
    assert sorted(path.name for path in Path().iterdir() if "bundle" in path.name) == []


@pytest.mark.usefixtures("served")
def test_bundle_loads_neither_torch_nor_vllm_nor_numpy() -> None:
    script = (
        "import sys; from appliance.cli import main; code = main(['bundle', '-o', 'b.tar.gz'])\n"
        "sys.exit(code or ', '.join({'torch', 'vllm', 'numpy'} & set(sys.modules)) or 0)\n"
    )

    done = subprocess.run((sys.executable, "-c", script), capture_output=True, text=True)  # noqa: PLW1510

    assert done.returncode == 0, done.stderr
