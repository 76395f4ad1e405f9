"""What the build files and the patches to vLLM promise, read from the files themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PATCHES = ROOT / "kernels/patches/vllm/0.27.1"
SERIES = (PATCHES / "series").read_text().split()
BASE = re.compile(r"^ARG (DEBIAN_IMAGE|DEBIAN_DIGEST|CUDA_IMAGE|CUDA_DIGEST)=(\S+)$", re.MULTILINE)


def arguments(name: str) -> dict[str, str]:
    return dict(BASE.findall((ROOT / name).read_text()))


def test_bases_are_pinned_alike_in_both_files() -> None:
    build, runtime = arguments("Dockerfile.build"), arguments("Dockerfile.runtime")

    assert runtime == {key: build[key] for key in ("DEBIAN_IMAGE", "DEBIAN_DIGEST")}
    for name in ("DEBIAN_DIGEST", "CUDA_DIGEST"):
        assert re.fullmatch(r"@sha256:[0-9a-f]{64}", build[name])


@pytest.mark.parametrize("name", ["Dockerfile.build", "Dockerfile.runtime"])
def test_every_published_base_carries_its_digest(name: str) -> None:
    text = (ROOT / name).read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE))
    ours = stages | {"scratch", "${TOOLCHAIN}", "${BUILD_IMAGE}"}

    published = [base for base in bases if base not in ours]

    assert published
    assert all(re.fullmatch(r"\$\{\w+_IMAGE\}\$\{\w+_DIGEST\}", base) for base in published)


def test_series_lists_every_patch_once() -> None:
    assert sorted(SERIES) == sorted(path.name for path in PATCHES.glob("*.patch"))


@pytest.mark.parametrize("name", SERIES)
def test_patch_says_why_it_exists_and_when_it_can_go(name: str) -> None:
    header = (PATCHES / name).read_text().partition("\n--- ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (PATCHES.parent / "README.md").read_text().splitlines()
        if line.startswith(f"| {name.removesuffix('.patch')} ")
    ]

    for key in ("Subject", "Why", "Upstream", "Can go"):
        assert re.search(rf"^{key}: \S", header, re.MULTILINE), key
    assert len(rows) == 1
    assert len(rows[0]) == 4
    assert all(rows[0])
