"""The whole job on small checkpoints: what it writes and what it refuses."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.checkpoint.tensors import open_tensors
from appliance.cli import main
from appliance.errors import ApplianceError, ExitCode
from appliance.quantize.job import Job, quantize
from appliance.quantize.settings import settings_of

Cli = Callable[..., Any]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def run(source: Path, target: Path, *, mode: str = "fast", **options: Any) -> dict[str, Any]:
    stream = options.pop("stream", io.StringIO())
    return quantize(Job(source, target, settings_of(mode, threads=1, **options)), stream)


def refusal(source: Path, target: Path, **options: Any) -> ApplianceError:
    with pytest.raises(ApplianceError) as raised:
        run(source, target, **options)
    assert not target.exists()
    return raised.value


def codes(error: ApplianceError) -> set[str]:
    return {fault.code for fault in error.faults}


def test_quantize_writes_compressed_tensors_names_and_keeps_the_rest(
    llama: Any, tmp_path: Path
) -> None:
    source = llama.write(tmp_path / "src")

    run(source, tmp_path / "dst")

    with open_tensors(tmp_path / "dst") as made, open_tensors(source) as dense:
        prefix = "model.layers.0.mlp.down_proj"
        assert f"{prefix}.weight" not in made
        assert made.entry(f"{prefix}.weight_packed").shape == (64, 64)
        assert made.entry(f"{prefix}.weight_packed").dtype == "U8"
        assert made.entry(f"{prefix}.weight_scale").shape == (64, 8)
        assert made.entry(f"{prefix}.weight_scale").dtype == "F8_E4M3"
        assert made.entry(f"{prefix}.weight_global_scale").shape == (1,)
        for name in ("model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"):
            np.testing.assert_array_equal(made.array(name), dense.array(name))
            assert made.entry(name).dtype == dense.entry(name).dtype


def test_quantize_shares_one_global_scale_over_each_fused_site(llama: Any, tmp_path: Path) -> None:
    source = llama.write(tmp_path / "src")
    amax = {name: float(np.abs(values).max()) for name, values in llama.tensors.items()}

    run(source, tmp_path / "dst")

    with open_tensors(tmp_path / "dst") as made:

        def divisor(module: str) -> float:
            return float(made.array(f"model.layers.0.{module}.weight_global_scale")[0])

        largest = max(amax[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
        shared = {divisor(f"self_attn.{x}_proj") for x in "qkv"}
        assert len(shared) == 1
        assert shared.pop() == pytest.approx(2688 / largest, rel=1e-3)
        assert divisor("mlp.gate_proj") == divisor("mlp.up_proj") != divisor("mlp.down_proj")


def test_quantize_site_over_two_shards_shares_the_scale_of_both(llama: Any, tmp_path: Path) -> None:
    llama.shard_of = lambda name: "b.safetensors" if "k_proj" in name else "a.safetensors"
    run(llama.write(tmp_path / "split"), tmp_path / "from_split")
    llama.shard_of = lambda _: "model.safetensors"
    run(llama.write(tmp_path / "whole"), tmp_path / "from_whole")

    with (
        open_tensors(tmp_path / "from_split") as split,
        open_tensors(tmp_path / "from_whole") as one,
    ):
        assert set(split.names()) == set(one.names())
        for name in one.names():
            np.testing.assert_array_equal(split.array(name), one.array(name))


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_quantize_decodes_within_the_published_error_from_every_type(
    llama: Any, tmp_path: Path, dtype: str
) -> None:
    llama.dtype = dtype
    source = llama.write(tmp_path / "src")

    report = run(source, tmp_path / "dst")

    with open_tensors(tmp_path / "dst") as made, open_tensors(source) as dense:
        error = energy = 0.0
        for module in report["tensors"]:
            packed = made.array(f"{module}.weight_packed")
            nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
            codes = np.where(nibbles & 8, -1, 1) * E2M1[nibbles & 7]
            scale = made.array(f"{module}.weight_scale").astype(np.int64)
            scale = np.where(
                scale < 8, scale * 2.0**-9, (1 + scale % 8 / 8) * 2.0 ** (scale // 8 - 7)
            )
            divisor = float(made.array(f"{module}.weight_global_scale")[0])
            exact = dense.float32(f"{module}.weight").astype(np.float64)
            error += ((codes * np.repeat(scale, 16, 1) / divisor - exact) ** 2).sum()
            energy += (exact**2).sum()
        assert error / energy == pytest.approx(report["relative_mse"], rel=1e-5)
        assert error / energy < 6.8e-3


def test_quantize_of_experts_gives_each_its_own_scale_and_a_dense_router(
    llama: Any, tmp_path: Path, with_experts: Callable[..., None]
) -> None:
    rng = np.random.default_rng(1)
    experts = {}
    for expert in range(3):
        for part, shape in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
            values = rng.normal(0, 0.02 * (expert + 1), shape).astype(np.float32)
            experts[f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"] = values
    with_experts(llama, experts)

    run(llama.write(tmp_path / "src"), tmp_path / "dst")

    with open_tensors(tmp_path / "dst") as made:
        divisors = {
            (expert, part): float(
                made.array(f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight_global_scale")[
                    0
                ]
            )
            for expert in range(3)
            for part in ("gate", "up")
        }
        assert all(divisors[expert, "gate"] == divisors[expert, "up"] for expert in range(3))
        assert len(set(divisors.values())) == 3
        assert "model.layers.0.mlp.gate.weight" in made
    config = json.loads((tmp_path / "dst/config.json").read_text())
    ignore = config["quantization_config"]["ignore"]
    assert ignore == ["lm_head", r"re:.*\.mlp\.gate$"]
    assert re.match(ignore[1][3:], "model.layers.0.mlp.gate")
    assert not re.match(ignore[1][3:], "model.layers.0.mlp.gate_proj")


def test_quantize_of_stacked_experts_equals_that_of_separate_ones(
    llama: Any, tmp_path: Path, with_experts: Callable[..., None]
) -> None:
    rng = np.random.default_rng(1)
    with_experts(llama, {})
    gate_up = rng.normal(0, 0.02, (3, 64, 64)).astype(np.float32)
    gate_up[1] *= 3
    down = rng.normal(0, 0.02, (3, 64, 32)).astype(np.float32)
    base = "model.layers.0.mlp.experts"
    dense = dict(llama.tensors)
    llama.tensors = dense | {f"{base}.gate_up_proj": gate_up, f"{base}.down_proj": down}
    run(llama.write(tmp_path / "stacked"), tmp_path / "from_stacked")
    llama.tensors = dense | {
        f"{base}.{expert}.{leaf}_proj.weight": values
        for expert in range(3)
        for leaf, values in (
            ("gate", gate_up[expert, :32]),
            ("up", gate_up[expert, 32:]),
            ("down", down[expert]),
        )
    }

    run(llama.write(tmp_path / "separate"), tmp_path / "from_separate")

    with (
        open_tensors(tmp_path / "from_stacked") as one,
        open_tensors(tmp_path / "from_separate") as two,
    ):
        assert set(one.names()) == set(two.names())
        for name in two.names():
            np.testing.assert_array_equal(one.array(name), two.array(name))


def test_quantize_copies_small_files_and_no_foreign_weights(llama: Any, tmp_path: Path) -> None:
    llama.extra = {
        "tokenizer.json": "{}",
        "chat_template.jinja": "x",
        "LICENSE": "y",
        "pytorch_model.bin": "old weights",
        ".hidden": "z",
    }

    run(llama.write(tmp_path / "src"), tmp_path / "dst")

    assert {path.name for path in (tmp_path / "dst").iterdir()} == {
        "LICENSE",
        "quantize_report.png",
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "quantize_report.json",
        "tokenizer.json",
    }


def test_quantize_report_states_errors_scales_mode_and_speed(llama: Any, tmp_path: Path) -> None:
    report = run(llama.write(tmp_path / "src"), tmp_path / "dst", mode="rtn")

    stored = json.loads((tmp_path / "dst/quantize_report.json").read_text())
    assert report == stored | {"already_there": False}
    assert report["mode"] == "rtn"
    assert report["weights"] == 2 * (4 * 64 * 64 + 3 * 128 * 64)
    assert report["weights_per_s"] > 0
    assert len(report["tensors"]) == 14
    assert report["tensors"]["model.layers.1.self_attn.v_proj"]["site"].endswith("qkv_proj")
    assert 8e-3 < report["relative_mse"] < 9.5e-3


def test_quantize_again_with_the_same_job_changes_nothing(llama: Any, tmp_path: Path) -> None:
    source = llama.write(tmp_path / "src")
    first = run(source, tmp_path / "dst")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "dst").iterdir()}

    second = run(source, tmp_path / "dst")

    assert second == first | {"already_there": True}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "dst").iterdir()} == before


def test_quantize_again_tells_no_speed_of_the_run_before(
    llama: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quantize", str(llama.write(tmp_path / "src")), str(tmp_path / "dst")]
    assert main(words) == 0
    assert "M weights/s" in capsys.readouterr().out

    assert main(words) == 0

    told = capsys.readouterr().out
    assert told.startswith(f"{tmp_path / 'dst'} is there already, made by the same job: mode fast")
    assert "weights/s" not in told


def test_quantize_into_another_jobs_output_is_refused(llama: Any, tmp_path: Path) -> None:
    source = llama.write(tmp_path / "src")
    run(source, tmp_path / "dst")

    with pytest.raises(ApplianceError) as raised:
        run(source, tmp_path / "dst", mode="rtn")

    assert codes(raised.value) == {"OUTPUT_EXISTS"}
    assert raised.value.exit_code == ExitCode.USAGE


def test_quantize_over_a_finished_output_that_lost_a_shard_is_refused(
    llama: Any, tmp_path: Path
) -> None:
    source = llama.write(tmp_path / "src")
    job = Job(source, tmp_path / "dst", settings_of("rtn", threads=1))
    quantize(job, io.StringIO())
    (tmp_path / "dst/model.safetensors").unlink()

    with pytest.raises(ApplianceError) as raised:
        quantize(job, io.StringIO())

    assert raised.value.faults[0].code == "OUTPUT_DAMAGED"


def test_quantize_of_a_source_where_the_output_is_built_leaves_the_source(
    llama: Any, tmp_path: Path
) -> None:
    source = llama.write(tmp_path / "dst.part")
    before = {path.name: path.read_bytes() for path in source.iterdir()}

    with pytest.raises(ApplianceError) as raised:
        quantize(Job(source, tmp_path / "dst", settings_of("rtn", threads=1)), io.StringIO())

    assert raised.value.faults[0].code == "OUTPUT_FOREIGN"
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_quantize_of_a_killed_run_in_another_mode_starts_afresh(
    sharded_llama: Any, tmp_path: Path, read_tree: Callable[[Path], dict[str, bytes]]
) -> None:
    source = sharded_llama.write(tmp_path / "src")
    refusal(source, tmp_path / "dst", error_limit=6.6e-3)  # leaves a DST.part
    run(source, tmp_path / "clean", mode="rtn")

    run(source, tmp_path / "dst", mode="rtn")

    assert read_tree(tmp_path / "dst") == read_tree(tmp_path / "clean")
    assert not (tmp_path / "dst.part").exists()


def test_quantize_notes_dense_values_that_fp16_cannot_hold(llama: Any, tmp_path: Path) -> None:
    llama.dtype = "BF16"
    llama.tensors["model.norm.weight"] = np.full(64, 1e5, np.float32)
    stream = io.StringIO()

    report = run(llama.write(tmp_path / "src"), tmp_path / "dst", stream=stream)

    assert [note.split()[:2] for note in report["notes"]] == [
        ["W_FP16_RANGE", "model.norm.weight:"]
    ]
    assert "WARNING quantize.note W_FP16_RANGE model.norm.weight" in stream.getvalue()


def test_quantize_of_an_all_zero_matrix_is_exact(llama: Any, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj"
    llama.tensors[f"{name}.weight"] = np.zeros_like(llama.tensors[f"{name}.weight"])

    report = run(llama.write(tmp_path / "src"), tmp_path / "dst")

    assert report["tensors"][name]["relative_mse"] == 0.0
    assert report["tensors"][name]["weight_global_scale"] == 1.0


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("mode", ["fast", "quasar-g128"])
def test_quantize_takes_tensors_at_odd_places(
    make_model: Callable[..., Any], tmp_path: Path, mode: str, dtype: str
) -> None:
    files = make_model(width=256)
    files.dtype = dtype
    source = files.write(tmp_path / "src")
    run(source, tmp_path / "even", mode=mode)
    path = source / "model.safetensors"
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    path.write_bytes((end - 8 + 1).to_bytes(8, "little") + raw[8:end] + b" " + raw[end:])

    run(source, tmp_path / "odd", mode=mode)

    name = "model.safetensors"
    assert (tmp_path / "odd" / name).read_bytes() == (tmp_path / "even" / name).read_bytes()
