"""The engine's stored peer access results never outlive the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from appliance.serve import run as serve_run
from appliance.serve.engine_cache import cache_root, remove_p2p_results
from appliance.serve.events import EventLog

if TYPE_CHECKING:
    from pathlib import Path

NAME = "gpu_p2p_access_cache_for_GPU-old-a,GPU-old-b.json"


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"VLLM_CACHE_ROOT": "/c/vllm", "XDG_CACHE_HOME": "/x"}, "/c/vllm"),
        ({"VLLM_CACHE_ROOT": "~/c", "HOME": "/h"}, "/h/c"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/vllm"),
        ({"HOME": "/h"}, "/h/.cache/vllm"),
    ],
)
def test_cache_root_follows_the_engines_rules(environ: dict[str, str], root: str) -> None:
    assert str(cache_root(environ)) == root


def test_rc_008_stored_result_of_other_gpus_is_removed_and_the_rest_stays(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"0->1": true}')
    (tmp_path / "gpu_p2p_access_cache_for_0,1.json").write_text("{}")
    (tmp_path / "torch_compile_cache").mkdir()

    found = list(remove_p2p_results(tmp_path))

    assert [error for _, error in found] == ["", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["torch_compile_cache"]


def test_rc_008_nothing_there_is_no_fault(tmp_path: Path) -> None:
    assert list(remove_p2p_results(tmp_path / "absent")) == []


def test_rc_008_removal_is_logged_and_one_that_fails_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / NAME).write_text("{}")
    (tmp_path / "gpu_p2p_access_cache_for_0,1.json").mkdir()

    serve_run._forget_p2p_results(EventLog("json", "info"), {"VLLM_CACHE_ROOT": str(tmp_path)})

    shown = capsys.readouterr()
    said = shown.out + shown.err
    assert said.count("engine.p2p_cache_removed") == 1
    assert said.count("engine.p2p_cache_kept") == 1
