"""What stands where transformers would need torchvision."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from appliance.vllm_plugin import text_only

NAMES = tuple(text_only._MODULES)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_stand_ins_have_the_names_that_the_engine_imports_and_refuse_to_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    text_only.stand_in_for_torchvision()

    for name, members in text_only._MODULES.items():
        for member in members:
            with pytest.raises(ImportError, match="serves text"):
                getattr(sys.modules[name], member)(1, size=2)
    for name in NAMES:
        del sys.modules[name]


def test_torchvision_that_is_installed_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())

    text_only.stand_in_for_torchvision()

    assert not set(NAMES) & sys.modules.keys()


def test_modules_that_are_there_already_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, NAMES[0], sys)

    text_only.stand_in_for_torchvision()

    assert sys.modules.pop(NAMES[0]) is sys
    del sys.modules[NAMES[1]]
