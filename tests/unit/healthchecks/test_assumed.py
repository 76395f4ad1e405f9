"""Hosts that are only assumed."""

from __future__ import annotations

import pytest

from healthchecks.assumed import SPELLING, assumed_host

MIB = 1024**2


def test_assumed_host_has_idle_v100s_of_the_size_nvml_reports() -> None:
    host = assumed_host("2x16GiB")

    assert [gpu.index for gpu in host.gpus] == [0, 1]
    assert {gpu.memory_total_bytes for gpu in host.gpus} == {16160 * MIB}
    assert {gpu.memory_free_bytes for gpu in host.gpus} == {16160 * MIB}
    assert {gpu.compute_capability for gpu in host.gpus} == {(7, 0)}
    assert len({gpu.uuid for gpu in host.gpus}) == 2


@pytest.mark.parametrize(
    ("spec", "lanes", "permission"),
    [("2x32GiB", None, None), ("2x32GiB-nvlink", 2, None), ("2x32GiB-p2p", 0, "OK")],
)
def test_assumed_way_between_cards_is_what_the_suffix_says(
    spec: str, lanes: int | None, permission: str | None
) -> None:
    (pair,) = assumed_host(spec).pairs

    assert (pair.a, pair.b, pair.nvlink_lanes) == (0, 1, lanes)
    assert pair.read_ab == pair.write_ba == permission


def test_assumed_host_of_four_has_every_pair() -> None:
    assert len(assumed_host("4x32GiB").pairs) == 6


@pytest.mark.parametrize(
    "spec",
    ["", "16GiB", "0x16GiB", "9x16GiB", "2x24GiB", "2x16GB", "2x16GiB-pcie", "2x16GiB\u0663"],
)
def test_other_spelling_is_refused_with_the_right_one(spec: str) -> None:
    with pytest.raises(ValueError, match="COUNTxSIZE") as caught:
        assumed_host(spec)

    assert str(caught.value) == SPELLING
