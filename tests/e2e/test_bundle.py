"""The support bundle of a service that runs, and of one that has died, over the stand-in engine."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waiting import until

if TYPE_CHECKING:
    from conftest import Running, Start

KEY = "team-a-3f9c1b77d2"
TOKEN = "hf_" + "Ab1" * 10
SAID = (f"INFO request headers: Authorization: Bearer {KEY}", f"INFO loading with token {TOKEN}")


def bundle(running: Running, folder: Path, *words: str) -> dict[str, bytes]:
    """Make a bundle as the operator of the service would; return what is in it."""
    target = folder / "bundle.tar.gz"
    config = folder / "appliance.yaml"
    command = (sys.executable, "-m", "appliance", "bundle", "--config", config, "-o", target)
    done = subprocess.run((*command, "--force", *words), capture_output=True, text=True)  # noqa: PLW1510
    assert done.returncode == 0, done.stderr
    found: dict[str, bytes] = {}
    with tarfile.open(target) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.removeprefix("appliance-bundle/")] = file.read()
    whole = b"\n".join([*found.values(), done.stdout.encode(), done.stderr.encode()])
    orders = running.state / "run/handoff.json"
    secrets = [KEY, TOKEN]
    if orders.exists():
        secrets.append(json.loads(orders.read_text())["token"])
    assert [secret for secret in secrets if secret.encode() in whole] == []
    return found


def missing(found: dict[str, bytes]) -> dict[str, str]:
    manifest: dict[str, Any] = json.loads(found["MANIFEST.json"])
    return {part["path"]: part["reason"] for part in manifest["missing"]}


def test_bundle_of_a_running_service_has_what_it_says_and_does_not_disturb_it(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    server = f", api_keys_file: {tmp_path}/keys"
    running = start(server=server, behave={"log": SAID}, variables={"HF_TOKEN": TOKEN})
    running.wait_for("ready", 200)
    running.family()
    kept = (running.state / "serve.json").read_bytes()

    found = bundle(running, tmp_path, "--log", str(running.log))

    status = json.loads(found["status.json"])
    assert status["phase"] == "ready"
    assert status["engine"]["pid"] == running.engine_pid()
    plan = json.loads(found["running_plan.json"])
    assert plan["server"]["api_keys_file"] == f"{tmp_path}/keys"
    assert plan["server"]["port"] == json.loads(found["plan.json"])["server"]["port"]
    assert b"appliance_ready 1.0" in found["metrics.txt"]
    kept_whole = ("status.json", "running_plan.json", "metrics.txt", "plan.json", "gate.json")
    assert [name for name in kept_whole if b"[removed]" in found[name]] == []
    assert "request headers: Authorization: [removed]" in found["log.txt"].decode()
    assert json.loads(found["state/serve.json"])["running"]["at"] > 0
    assert {"status.json", "log.txt", "doctor.json"}.isdisjoint(missing(found))
    assert (running.state / "serve.json").read_bytes() == kept
    assert running.probe("ready")[0] == 200
    running.stop()
    assert running.wait() == 0
    running.assert_nothing_left()


def test_bundle_asks_where_the_service_listens_though_the_file_was_edited(
    start: Start, tmp_path: Path
) -> None:
    running = start()
    running.wait_for("ready", 200)
    config = tmp_path / "appliance.yaml"
    config.write_text(
        config.read_text().replace(f"admin_port: {running.admin_port}", "admin_port: 9")
    )
    until(lambda: running.status()["config"]["drift"], "the edit noticed")

    found = bundle(running, tmp_path)

    assert json.loads(found["status.json"])["config"]["drift"] is True
    assert json.loads(found["config.json"])["values"]["server"]["admin_port"] == 9


def test_bundle_of_a_service_that_died_names_the_cause(start: Start, tmp_path: Path) -> None:
    oom = "ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    running = start(ladder="false", behave={"log": (*SAID, oom), "exit": 1})
    assert running.wait() == 40
    last = running.state / "last_run.json"
    until(last.exists, "the last run's lines")

    found = bundle(running, tmp_path)

    assert oom in found["log.txt"].decode()
    assert json.loads(found["state/last_run.json"])["exit_code"] == 40
    ask = (sys.executable, "-m", "appliance", "doctor", "--state-dir", running.state, "--json")
    said = json.loads(subprocess.run(ask, capture_output=True, text=True, check=False).stdout)
    assert json.loads(found["doctor.json"])["code"] == said["code"] == "CUDA_OOM"
    assert "NOT_RUNNING" in missing(found)["status.json"]
    assert missing(found)["metrics.txt"] == "no appliance answers, see status.json"
