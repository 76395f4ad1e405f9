"""Golden files: whole outputs, renewed only by `make golden`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import yaml


def test_golden_files_are_what_the_code_renders(golden: ModuleType) -> None:
    stale = [
        str(path)
        for path, text in golden.golden_files().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]

    assert stale == [], "renew by `make golden` and read the difference"


def test_golden_folders_are_the_cases(cases: ModuleType, repository: Path) -> None:
    folders = {
        path.name for path in (repository / "tests/golden/render").iterdir() if path.is_dir()
    }

    assert folders - {"__pycache__"} == set(cases.CASES)


@pytest.mark.engine
@pytest.mark.slow
def test_golden_flag_list_is_that_of_the_installed_vllm(golden: ModuleType) -> None:
    for path, text in golden.engine_files().items():
        assert path.read_text(encoding="utf-8") == text, "renew by `make golden`"


def test_golden_kubernetes_patch_is_valid_yaml_with_agreeing_numbers(cases: ModuleType) -> None:
    for name, case in cases.CASES.items():
        patch = yaml.safe_load(cases.outputs(case)["kubernetes.yaml"])
        pod = patch["spec"]["template"]["spec"]
        container = pod["containers"][0]
        startup = container["startupProbe"]

        budget = startup["failureThreshold"] * startup["periodSeconds"]
        assert budget >= case.plan.run.startup_timeout_s, name
        assert pod["terminationGracePeriodSeconds"] > case.plan.server.drain_timeout_s, name
        assert pod["enableServiceLinks"] is False, name
        assert pod["volumes"][0]["emptyDir"] == {
            "medium": "Memory",
            "sizeLimit": str(case.plan.memory.shm_bytes),
        }, name
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert "initialDelaySeconds" not in container[probe], name
            assert container[probe]["timeoutSeconds"] >= 10, name
            assert container[probe]["failureThreshold"] >= 3, name
        assert "vllm" not in container["name"], name
