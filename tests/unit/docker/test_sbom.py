"""The bill of materials of an image: what is added, in which order, and when it is refused."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "docker/sbom.py"
STATUS = """Package: tini
Status: install ok installed
Architecture: amd64
Version: 0.19.0-1+b1
Description: tiny init
 Package: not a field

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: adduser
Status: install ok installed
Architecture: all
Version: 1:3.134
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a bill of Python's packages, dpkg's status and one library."""
    python = {"bom-ref": "torch==2", "name": "torch", "type": "library", "version": "2"}
    (tmp_path / "bom.json").write_text(
        json.dumps({"bomFormat": "CycloneDX", "components": [python]})
    )
    (tmp_path / "status").write_text(STATUS)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libnvfp4_ref.so").write_bytes(b"code")
    return tmp_path


def complete(place: Path) -> subprocess.CompletedProcess[str]:
    given = ("--image", "i:cpu", "--dpkg", str(place / "status"), "--libraries", str(place / "lib"))
    return subprocess.run(
        (sys.executable, str(SCRIPT), str(place / "bom.json"), *given),
        capture_output=True,
        text=True,
        check=False,
    )


def test_installed_packages_and_libraries_are_added(place: Path) -> None:
    done = complete(place)
    assert done.returncode == 0, done.stderr

    bill = json.loads((place / "bom.json").read_text())
    assert bill["metadata"]["component"]["name"] == "i:cpu"
    assert [component["bom-ref"] for component in bill["components"]] == [
        "torch==2",
        "pkg:deb/debian/adduser@1%3A3.134?arch=all&distro=debian-12",
        "pkg:deb/debian/tini@0.19.0-1%2Bb1?arch=amd64&distro=debian-12",
        "file:libnvfp4_ref.so",
    ]
    digest = bill["components"][-1]["hashes"][0]["content"]
    assert digest == hashlib.sha256(b"code").hexdigest()


def test_image_without_our_libraries_is_refused_and_the_bill_is_left(place: Path) -> None:
    before = (place / "bom.json").read_text()
    (place / "lib/libnvfp4_ref.so").unlink()

    done = complete(place)

    assert done.returncode == 1
    assert "error[SBOM_EMPTY]" in done.stderr
    assert "got 2 and 0" in done.stderr
    assert (place / "bom.json").read_text() == before
