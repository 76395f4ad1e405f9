"""Checkpoints in other forms: the same weights to the last bit, or a refusal that says why."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from appliance.checkpoint.identity import identify
from appliance.checkpoint.read import read_checkpoint
from appliance.checkpoint.tensors import open_tensors
from appliance.checkpoint.writer import ShardWriter, TensorSpec
from appliance.cli import main
from appliance.convert import job as job_module
from appliance.convert.factor import reciprocal_of
from appliance.convert.job import Job, convert
from appliance.convert.source import open_source
from appliance.convert.target import Target
from appliance.errors import ApplianceError

CHECKPOINTS = Path(__file__).parents[5] / "shared" / "vectors" / "ckpt"
KILL_AT = Path(__file__).parents[1] / "kill_at.py"

pytestmark = pytest.mark.skipif(not CHECKPOINTS.exists(), reason="no shared folder")


def refusal(job: Job) -> tuple[int, str]:
    with pytest.raises(ApplianceError) as caught:
        convert(job)
    assert not job.target.exists()
    return int(caught.value.exit_code), caught.value.faults[0].code


def with_globals(source: Path, target: Path, value: float) -> Path:
    """A copy whose globals are all one number."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    with open_tensors(source) as reader:
        for shard in reader.shards:
            entries = reader.in_shard(shard)
            specs = [TensorSpec(each.name, each.dtype, each.shape) for each in entries]
            with ShardWriter(target / shard, specs) as writer:
                for spec in specs:
                    array = reader.array(spec.name)
                    is_global = spec.name.endswith("weight_global_scale")
                    writer.write(spec.name, np.full_like(array, value) if is_global else array)
    return target


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("ok_modelopt_w4a4", ("container", "quasar-st", "modelopt", "quasar-st", "container")),
        ("ok_quasar_st_f16", ("container", "quasar-st", "container")),
        ("ok_quasar_st_f32", ("container", "quasar-st")),
        ("ok_moe_per_expert", ("container", "modelopt")),
        ("ok_modelopt_legacy_hfquant_only", ("modelopt", "quasar-st")),
        ("ok_ct_w4a16", ("compressed-tensors",)),
    ],
)
def test_convert_through_other_forms_keeps_every_digest(
    tmp_path: Path, name: str, forms: tuple[str, ...]
) -> None:
    first = source = CHECKPOINTS / name
    for number, form in enumerate(forms):
        target = tmp_path / f"{number}"
        convert(Job(source, target, Target(form)))
        source = target

    before, after = identify(first), identify(source)

    assert before.modules == after.modules
    assert before.dense == after.dense
    assert after.modules


@pytest.mark.parametrize("form", ["modelopt", "quasar-st", "container"])
def test_convert_of_divisors_with_exact_reciprocals_keeps_every_digest(
    tmp_path: Path, form: str
) -> None:
    source = with_globals(CHECKPOINTS / "ok_ct_w4a16", tmp_path / "src", 2.0**13)

    report = convert(Job(source, tmp_path / "there", Target(form)))
    convert(Job(tmp_path / "there", tmp_path / "back", Target.COMPRESSED_TENSORS))

    assert report["weights_sha256"] == identify(source).weights_sha256
    assert identify(tmp_path / "back").modules == identify(source).modules


def test_convert_that_would_round_is_refused_unless_that_is_wanted(tmp_path: Path) -> None:
    source = CHECKPOINTS / "ok_ct_w4a16"

    assert refusal(Job(source, tmp_path / "dst", Target.MODELOPT)) == (30, "CONVERT_INEXACT")

    report = convert(Job(source, tmp_path / "dst", Target.MODELOPT, allow_rounding=True))
    assert 0 < report["largest_difference"] < 1.3e-7
    with open_source(source) as before, open_source(tmp_path / "dst") as after:
        for one, two in zip(before.quantized, after.quantized, strict=True):
            np.testing.assert_allclose(two.open().values(), one.open().values(), rtol=1.3e-7)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("ok_quasar_st_f16", "compressed-tensors"),
        ("ok_quasar_st_f16", "modelopt"),
        ("ok_modelopt_mixed_fp8", "container"),
    ],
)
def test_convert_to_a_form_without_a_place_for_the_matrix_is_refused(
    tmp_path: Path, name: str, form: str
) -> None:
    job = Job(CHECKPOINTS / name, tmp_path / "dst", Target(form))

    assert refusal(job) == (30, "CONVERT_UNSUPPORTED")


@pytest.mark.parametrize(
    "name", ["ok_modelopt_mixed_fp8", "ok_ct_w4a16", "ok_quasar_st_f16", "ok_moe_per_expert"]
)
def test_convert_to_fp16_gives_the_nearest_numbers_and_a_dense_checkpoint(
    tmp_path: Path, name: str
) -> None:
    source = CHECKPOINTS / name

    report = convert(Job(source, tmp_path / "dst", Target.FP16))

    with open_source(source) as before, open_tensors(tmp_path / "dst") as made:
        for piece in before.quantized:
            stored = made.array(f"{piece.module}.weight")
            np.testing.assert_array_equal(stored, piece.open().values().astype(np.float16))
        for dense in before.dense:
            assert made.entry(dense.name).dtype == dense.dtype
            np.testing.assert_array_equal(made.array(dense.name), dense.array())
        assert len(made.names()) == report["modules"] + report["dense"]
    assert "quantization_config" not in json.loads((tmp_path / "dst/config.json").read_text())
    read_checkpoint(tmp_path / "dst")


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors", "quasar-st", "container"])
def test_convert_of_a_dense_checkpoint_is_refused_before_anything_is_written(
    tmp_path: Path, form: str
) -> None:
    dense = tmp_path / "dense"
    convert(Job(CHECKPOINTS / "ok_modelopt_w4a4", dense, Target.FP16))

    assert refusal(Job(dense, tmp_path / "dst", Target(form))) == (30, "CONVERT_UNSUPPORTED")
    assert not (tmp_path / "dst.part").exists()


def test_convert_to_fp16_of_weights_beyond_its_range_is_refused(tmp_path: Path) -> None:
    # 2^-8 as a divisor: scales up to 448 make weights up to 688128; the reader stops at 1000 first.
    source = with_globals(CHECKPOINTS / "ok_ct_w4a16", tmp_path / "src", 2.0**-8)

    assert refusal(Job(source, tmp_path / "dst", Target.FP16))[1] == "E_GLOBAL_DIRECTION"


def test_convert_names_what_it_leaves_out_and_says_so_once_more_when_run_again(
    tmp_path: Path,
) -> None:
    job = Job(CHECKPOINTS / "ok_modelopt_w4a4", tmp_path / "dst", Target.QUASAR_ST)

    report = convert(job)
    made = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "dst").iterdir()}

    assert any(name.endswith("input_scale") for name in report["dropped"])
    assert convert(job) == report | {"already_there": True}
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "dst").iterdir()} == made
    assert not (tmp_path / "dst/hf_quant_config.json").exists()


def test_convert_again_says_that_nothing_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(CHECKPOINTS / "ok_modelopt_w4a4"), str(tmp_path / "dst")]
    assert main([*words, "--to", "modelopt"]) == 0
    assert capsys.readouterr().out.startswith("converted ")

    assert main([*words, "--to", "modelopt"]) == 0

    assert capsys.readouterr().out.endswith("nothing was written\n")


@pytest.mark.parametrize("form", [Target.FP16, Target.MODELOPT, Target.CONTAINER])
def test_convert_again_over_an_output_that_lost_a_part_is_refused(
    tmp_path: Path, form: Target
) -> None:
    job = Job(CHECKPOINTS / "ok_modelopt_w4a4", tmp_path / "dst", form)
    convert(job)
    name = "model.qsr" if form is Target.CONTAINER else "model.safetensors"
    (job.target / name).write_bytes((job.target / name).read_bytes()[:-1])

    with pytest.raises(ApplianceError) as cut:
        convert(job)
    (job.target / name).unlink()
    with pytest.raises(ApplianceError) as gone:
        convert(job)

    for caught in (cut, gone):
        assert (caught.value.exit_code, caught.value.faults[0].code) == (31, "OUTPUT_DAMAGED")


@pytest.mark.parametrize("happens", ["changes", "goes away"])
def test_convert_of_a_source_that_changes_meanwhile_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: str
) -> None:
    source = tmp_path / "src"
    shutil.copytree(CHECKPOINTS / "ok_modelopt_w4a4", source)
    copy = job_module.copy_small_files

    def copied_late(directory: Path, target: Path) -> None:
        copy(directory, target)
        shard = next(source.glob("*.safetensors"))
        shard.unlink()
        if happens == "changes":
            shard.write_bytes(b"another")

    monkeypatch.setattr(job_module, "copy_small_files", copied_late)

    assert refusal(Job(source, tmp_path / "dst", Target.FP16)) == (31, "CONVERT_MISMATCH")


def test_reciprocal_of_a_power_of_two_is_exact_and_of_others_nearly() -> None:
    scales = np.arange(1, 0x7F, dtype=np.uint8)

    exact = reciprocal_of(np.float32(2.0**-11), scales, is_divisor=False)
    other = reciprocal_of(np.float32(1e-3 / 3), scales, is_divisor=False)

    assert (exact.value, exact.difference) == (np.float32(2.0**11), 0.0)
    assert 0 < other.difference < 1.3e-7


def run_killed(at: int, source: Path, target: Path, form: str) -> subprocess.CompletedProcess[str]:
    words = (str(at), str(target), "convert", str(source), str(target), "--to", form)
    return subprocess.run(
        (sys.executable, str(KILL_AT), *words), capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", ["container", "fp16"])
def test_convert_killed_at_any_step_leaves_all_or_nothing_and_a_rerun_finishes(
    tmp_path: Path, form: str
) -> None:
    source = CHECKPOINTS / "ok_modelopt_w4a4"
    whole = run_killed(0, source, tmp_path / "whole", form)
    assert whole.returncode == 0, whole.stderr
    events = int(whole.stderr.rpartition("events=")[2])
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert events > 10

    for at in range(1, events + 1, 5):
        target = tmp_path / f"dst{at}"
        killed = run_killed(at, source, target, form)
        assert killed.returncode == -9
        if target.exists():
            found = {path.name: path.read_bytes() for path in target.iterdir()}
            assert expected.items() <= found.items()  # the lock file may be left
        convert(Job(source, target, Target(form)))
        assert {path.name: path.read_bytes() for path in target.iterdir()}.items() >= (
            expected.items()
        )
        assert not target.with_name(f"{target.name}.part").exists()
