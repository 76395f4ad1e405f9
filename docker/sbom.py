#!/usr/bin/env python3
"""Completes an image's bill of materials, inside the build of its last stage.

    sbom.py BOM --image NAME --dpkg STATUS --libraries DIR

BOM is the CycloneDX file of the Python environment; Debian's packages and the libraries compiled
here are added to it. Standard library only. The same image gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

DISTRO = "debian-12"


def main() -> int:
    """Rewrite the file; return 0, or 1 if what it must hold is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bom", type=Path)
    parser.add_argument("--image", required=True)
    parser.add_argument("--dpkg", type=Path, required=True)
    parser.add_argument("--libraries", type=Path, required=True)
    given = parser.parse_args()
    bill = json.loads(given.bom.read_text(encoding="utf-8"))
    packages = debian_packages(given.dpkg.read_text(encoding="utf-8"))
    libraries = compiled(given.libraries)
    if not packages or not libraries:
        where, what = f"{given.dpkg}, {given.libraries}", "must list packages and libraries"
        value = f"{len(packages)} and {len(libraries)}"
        fix = "build the stage from Debian"
        sys.stderr.write(f"error[SBOM_EMPTY] {where}: {what}, got {value}; {fix}.\n")
        return 1
    given.bom.write_text(complete(bill, given.image, packages + libraries), encoding="utf-8")
    sys.stdout.write(f"{given.bom}: {len(packages)} packages, {len(libraries)} libraries added\n")
    return 0


def complete(bill: dict[str, Any], image: str, added: list[dict[str, Any]]) -> str:
    """Return the text of a bill with components added and the image as its subject."""
    subject = {"bom-ref": f"image:{image}", "name": image, "type": "container"}
    metadata = {**bill.get("metadata", {}), "component": subject}
    components = [*bill.get("components", []), *added]
    return json.dumps({**bill, "metadata": metadata, "components": components}, indent=1) + "\n"


def debian_packages(status: str) -> list[dict[str, Any]]:
    """Return a component for every installed package of dpkg's status file, by name."""
    found: list[dict[str, Any]] = []
    for paragraph in status.split("\n\n"):
        lines = (line.split(": ", 1) for line in paragraph.splitlines() if ": " in line)
        fields = {key: value for key, value in lines if not key.startswith(" ")}
        if fields.get("Status") == "install ok installed":
            found.append(_package(fields["Package"], fields["Version"], fields["Architecture"]))
    return sorted(found, key=lambda component: str(component["purl"]))


def _package(name: str, version: str, architecture: str) -> dict[str, Any]:
    place = f"pkg:deb/debian/{name}@{version.replace('+', '%2B').replace(':', '%3A')}"
    purl = f"{place}?arch={architecture}&distro={DISTRO}"
    return {"bom-ref": purl, "name": name, "purl": purl, "type": "library", "version": version}


def compiled(folder: Path) -> list[dict[str, Any]]:
    """Return a component for every library that the appliance's own wheel brings, with digest."""
    return [
        {
            "bom-ref": f"file:{path.name}",
            "hashes": [
                {"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}
            ],
            "name": path.name,
            "type": "file",
        }
        for path in sorted(folder.glob("*.so"))
    ]


if __name__ == "__main__":
    raise SystemExit(main())
