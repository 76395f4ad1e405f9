"""A configuration file from its text, and the faults of one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from appliance.config.load import LoadedConfig, load_config
from appliance.errors import ApplianceError, ExitCode, Fault

TODAY = date(2026, 11, 29)
BASE = "version: 1\nmodel: {path: /m}\n"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadedConfig]:
    monkeypatch.chdir(tmp_path)

    def loaded(text: str | bytes, *, base: str = BASE) -> LoadedConfig:
        content = text if isinstance(text, bytes) else (base + text).encode()
        Path("appliance.yaml").write_bytes(content)
        return load_config(Path("appliance.yaml"), today=TODAY)

    return loaded


@pytest.fixture
def faults_of(load: Callable[..., LoadedConfig]) -> Callable[..., list[Fault]]:
    def faults(text: str | bytes, *, base: str = BASE) -> list[Fault]:
        with pytest.raises(ApplianceError) as caught:
            load(text, base=base)
        assert caught.value.exit_code is ExitCode.CONFIG
        return list(caught.value.faults)

    return faults


@pytest.fixture
def only_fault(faults_of: Callable[..., list[Fault]]) -> Callable[..., Fault]:
    def fault(text: str | bytes, *, base: str = BASE) -> Fault:
        found = faults_of(text, base=base)
        assert len(found) == 1, [str(item) for item in found]
        return found[0]

    return fault
