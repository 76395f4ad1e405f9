"""Sources that are refused: the code, the exit code, and that nothing is left."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.checkpoint.identity import identify
from appliance.checkpoint.tensors import open_tensors
from appliance.errors import ApplianceError, ExitCode
from appliance.quantize import job as job_module
from appliance.quantize.job import Job, quantize
from appliance.quantize.settings import settings_of

Cli = Callable[..., subprocess.CompletedProcess[str]]


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


def unusual(rows: int) -> np.ndarray:
    """Weights [rows, 64] that all lie in the wide steps at the top of E2M1: error 8.7e-3."""
    return np.random.default_rng(0).uniform(0.6, 1.0, (rows, 64)).astype(np.float32)


def put_unusual(files: Any, rows: int) -> None:
    """Widen the model's MLPs to `rows` and give one of them unusual weights."""
    files.config["intermediate_size"] = rows
    rng = np.random.default_rng(3)
    for layer in range(2):
        for leaf in ("gate", "up", "down"):
            shape = (64, rows) if leaf == "down" else (rows, 64)
            values = rng.normal(0, 0.02, shape).astype(np.float32)
            files.tensors[f"model.layers.{layer}.mlp.{leaf}_proj.weight"] = values
    files.tensors["model.layers.1.mlp.up_proj.weight"] = unusual(rows)


def test_quantize_of_weights_that_lose_too_much_is_refused(llama: Any, tmp_path: Path) -> None:
    put_unusual(llama, 1024)

    error = refusal(llama.write(tmp_path / "src"), tmp_path / "dst")

    assert codes(error) == {"QUANT_ERROR_LIMIT"}
    assert error.exit_code == ExitCode.REGRESSION
    assert "model.layers.1.mlp.up_proj" in str(error)


def test_quantize_with_a_raised_limit_takes_the_same_weights(llama: Any, tmp_path: Path) -> None:
    put_unusual(llama, 1024)

    report = run(llama.write(tmp_path / "src"), tmp_path / "dst", error_limit=9e-3)

    assert report["tensors"]["model.layers.1.mlp.up_proj"]["relative_mse"] > 8e-3


def test_quantize_reports_a_small_unusual_matrix_without_judging_it(
    llama: Any, tmp_path: Path
) -> None:
    put_unusual(llama, 1008)

    report = run(llama.write(tmp_path / "src"), tmp_path / "dst")

    assert report["tensors"]["model.layers.1.mlp.up_proj"]["relative_mse"] > 8e-3


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ],
)
def test_quantize_of_non_finite_values_is_refused_before_it_writes(
    llama: Any, tmp_path: Path, name: str, value: float, dtype: str
) -> None:
    put_biases(llama)
    llama.dtype = dtype
    llama.tensors[name].flat[[3, 5]] = value
    source = llama.write(tmp_path / "src")

    error = refusal(source, tmp_path / "dst")

    [fault] = error.faults
    assert (fault.code, error.exit_code) == ("QUANT_NOT_FINITE", ExitCode.CHECKPOINT_CORRUPT)
    assert fault.where == f"{source / 'model.safetensors'} {name}"
    assert fault.value == f"2 NaN or infinite of {llama.tensors[name].size}"
    assert ("--allow-not-finite" in fault.fix) is (not name.endswith("v_proj.weight"))
    assert not (tmp_path / "dst.part").exists()


def put_biases(files: Any) -> None:
    files.config["attention_bias"] = True
    for layer in range(2):
        for leaf in "qkvo":
            module = f"model.layers.{layer}.self_attn.{leaf}_proj"
            rows = files.tensors[f"{module}.weight"].shape[0]
            files.tensors[f"{module}.bias"] = np.zeros(rows, np.float32)


def test_quantize_names_every_tensor_that_is_not_finite(llama: Any, tmp_path: Path) -> None:
    names = ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"]
    for name in names:
        llama.tensors[name].flat[0] = np.nan

    error = refusal(llama.write(tmp_path / "src"), tmp_path / "dst")

    assert {fault.where.rpartition(" ")[2] for fault in error.faults} == set(names)


def test_quantize_copies_non_finite_dense_values_where_it_is_told_to(
    llama: Any, tmp_path: Path, cli: Cli
) -> None:
    name = "model.norm.weight"
    llama.tensors[name].flat[3] = np.nan
    source, target = llama.write(tmp_path / "src"), tmp_path / "dst"

    done = cli("quantize", source, target, "--allow-not-finite")

    assert (done.returncode, done.stderr.count("W_NOT_FINITE model.norm.weight: 1 NaN")) == (0, 1)
    with open_tensors(source) as before, open_tensors(target) as after:
        assert after.array(name).tobytes() == before.array(name).tobytes()


def test_quantize_never_packs_what_is_not_finite(llama: Any, tmp_path: Path) -> None:
    llama.tensors["model.layers.0.self_attn.v_proj.weight"].flat[3] = np.nan
    source = llama.write(tmp_path / "src")

    error = refusal(source, tmp_path / "dst", allow_not_finite=True)

    assert codes(error) == {"QUANT_NOT_FINITE"}


def drop(name: str) -> Callable[[Any], None]:
    return lambda files: files.tensors.pop(name)


def put(name: str, *shape: int) -> Callable[[Any], None]:
    return lambda files: files.tensors.update({name: np.ones(shape, np.float32)})


def stacked(*shape: int, with_one_expert: bool = False) -> Callable[[Any], None]:
    """A stack of gate and up rows in a model whose experts are 32 wide."""

    def change(files: Any) -> None:
        configure(
            model_type="qwen3_5_moe", text_config={"moe_intermediate_size": 32, "hidden_size": 64}
        )(files)
        put("model.layers.0.mlp.experts.gate_up_proj", *shape)(files)
        if with_one_expert:
            put("model.layers.0.mlp.experts.2.up_proj.weight", 32, 64)(files)

    return change


def configure(**values: Any) -> Callable[[Any], None]:
    return lambda files: files.config.update(values)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (put("model.layers.0.mlp.down_proj.weight", 64, 120), "QUANT_BLOCK"),
        (put("model.layers.0.mlp.down_proj.weight", 64), "QUANT_BLOCK"),
        (put("model.layers.0.self_attn.qkv_proj.weight", 192, 64), "QUANT_UNKNOWN_TENSOR"),
        (put("model.layers.0.mlp.experts.gate_up_proj", 4, 64, 64), "QUANT_UNKNOWN_TENSOR"),
        (stacked(4, 96, 64), "QUANT_EXPERTS"),
        (stacked(64), "QUANT_EXPERTS"),
        (stacked(4, 64, 64, with_one_expert=True), "E_DUPLICATE_TENSOR"),
        (put("model.layers.0.mlp.up_proj.weight_scale", 64, 4), "QUANT_SOURCE"),
        (configure(quantization_config={"quant_method": "modelopt"}), "QUANT_SOURCE"),
        (configure(text_config={"quantization_config": {"bits": 4}}), "QUANT_SOURCE"),
        (configure(model_type="mamba"), "QUANT_ARCHITECTURE"),
        (configure(model_type=None), "QUANT_ARCHITECTURE"),
        (drop("model.layers.1.self_attn.k_proj.weight"), "QUANT_PART_MISSING"),
    ],
    ids=[
        "odd-width",
        "vector",
        "fused-name",
        "experts-in-a-dense-model",
        "transposed-experts",
        "flat-experts",
        "experts-twice",
        "scale-tensor",
        "modelopt-config",
        "nested-config",
        "foreign-type",
        "no-type",
        "lone-part",
    ],
)
def test_quantize_of_an_unfit_source_is_refused_before_anything_is_written(
    llama: Any, tmp_path: Path, change: Callable[[Any], None], code: str
) -> None:
    change(llama)

    error = refusal(llama.write(tmp_path / "src"), tmp_path / "dst")

    assert code in codes(error)
    assert error.exit_code == ExitCode.CHECKPOINT_UNSUPPORTED
    assert not (tmp_path / "dst.part").exists()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (configure(num_hidden_layers=3), "E_MISSING_TENSOR"),
        (configure(tie_word_embeddings=False), "E_MISSING_TENSOR"),
        (drop("model.norm.weight"), "E_MISSING_TENSOR"),
        (drop("model.layers.1.self_attn.o_proj.weight"), "E_MISSING_TENSOR"),
        (put("lm_head.weight", 96, 64), "E_CONFIG_TENSOR_MISMATCH"),
        (configure(hidden_size=128), "E_SHAPE"),
        (configure(num_attention_heads=None), "E_CONFIG"),
    ],
    ids=["layer", "head", "norm", "linear", "another-tied-head", "width", "heads-unsaid"],
)
def test_quantize_of_a_model_that_would_not_be_served_is_refused_first(
    llama: Any, tmp_path: Path, change: Callable[[Any], None], code: str
) -> None:
    change(llama)

    error = refusal(llama.write(tmp_path / "src"), tmp_path / "dst")

    assert codes(error) == {code}
    assert error.exit_code == ExitCode.CHECKPOINT_UNSUPPORTED
    assert not (tmp_path / "dst.part").exists()


@pytest.mark.parametrize("mode", ["fast", "rtn", "quasar-g128"])
def test_quantize_of_weights_that_no_reader_takes_is_refused(
    make_model: Callable[..., Any], tmp_path: Path, mode: str
) -> None:
    files = make_model(width=128)
    files.tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 1000.0
    run(files.write(tmp_path / "most"), tmp_path / "made", mode="fast")
    identify(tmp_path / "made")
    files.tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 1001.0

    error = refusal(files.write(tmp_path / "src"), tmp_path / "dst", mode=mode)

    assert codes(error) == {"QUANT_WEIGHT_RANGE"}
    assert error.exit_code == ExitCode.CHECKPOINT_UNSUPPORTED
    assert "down_proj" in str(error)


@pytest.mark.parametrize("happens", ["changes", "goes away"])
def test_quantize_of_a_source_that_changes_meanwhile_makes_nothing_and_a_rerun_does(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: str
) -> None:
    source = llama.write(tmp_path / "src")
    shard = source / "model.safetensors"
    content = shard.read_bytes()
    draw = job_module.draw_report

    def drawn_late(report: dict[str, Any]) -> bytes | None:
        shard.unlink()
        if happens == "changes":
            shard.write_bytes(content[:-4] + bytes(4))
        return draw(report)

    with monkeypatch.context() as patch:
        patch.setattr(job_module, "draw_report", drawn_late)
        error = refusal(source, tmp_path / "dst")

    assert codes(error) == {"QUANT_SOURCE_CHANGED"}
    assert error.exit_code == ExitCode.CHECKPOINT_CORRUPT
    shard.write_bytes(content)
    assert run(source, tmp_path / "dst")["weights"] > 0


def test_quantize_names_every_fault_of_a_source_at_once(llama: Any, tmp_path: Path) -> None:
    put("model.layers.0.mlp.down_proj.weight", 64, 120)(llama)
    put("model.layers.0.extra.weight", 4)(llama)
    drop("model.layers.1.self_attn.k_proj.weight")(llama)

    error = refusal(llama.write(tmp_path / "src"), tmp_path / "dst")

    assert codes(error) == {"QUANT_BLOCK", "QUANT_UNKNOWN_TENSOR", "QUANT_PART_MISSING"}


def test_quantize_of_a_source_without_linears_is_refused(llama: Any, tmp_path: Path) -> None:
    llama.tensors = {"model.norm.weight": np.ones(64, np.float32)}

    assert codes(refusal(llama.write(tmp_path / "src"), tmp_path / "dst")) == {"QUANT_NOTHING"}


def test_quantize_of_a_source_with_a_missing_shard_is_refused(
    sharded_llama: Any, tmp_path: Path
) -> None:
    source = sharded_llama.write(tmp_path / "src")
    (source / "model-00003.safetensors").unlink()

    error = refusal(source, tmp_path / "dst")

    assert codes(error) == {"E_MISSING_SHARD"}
    assert error.exit_code == ExitCode.CHECKPOINT_UNSUPPORTED


def test_quantize_of_a_truncated_shard_is_refused_as_corrupt(llama: Any, tmp_path: Path) -> None:
    source = llama.write(tmp_path / "src")
    shard = source / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])

    error = refusal(source, tmp_path / "dst")

    assert codes(error) == {"E_TRUNCATED"}
    assert error.exit_code == ExitCode.CHECKPOINT_CORRUPT


def test_quantize_without_a_config_is_refused(llama: Any, tmp_path: Path) -> None:
    source = llama.write(tmp_path / "src")
    (source / "config.json").unlink()

    assert codes(refusal(source, tmp_path / "dst")) == {"E_CONFIG"}


@pytest.mark.parametrize("text", ["0", "-1", "1e3", "\u00b2", "99999999999", ""])
def test_quantize_thread_count_out_of_range_says_the_range(text: str, cli: Cli) -> None:
    done = cli("quantize", "a", "b", f"--threads={text}")

    assert done.returncode == ExitCode.USAGE
    assert "an integer from 1 to 1024" in done.stderr


@pytest.mark.parametrize("text", ["x", "nan", "1", "0", "inf"])
def test_quantize_error_limit_out_of_range_says_the_range(text: str, cli: Cli) -> None:
    done = cli("quantize", "a", "b", f"--error-limit={text}")

    assert done.returncode == ExitCode.USAGE
    assert "a number between 0 and 1" in done.stderr


def test_quantize_source_that_shrinks_while_it_is_read_is_refused(
    llama: Any, tmp_path: Path
) -> None:
    source = llama.write(tmp_path / "src")
    with open_tensors(source) as reader:
        shard = source / reader.shards[0]
        shard.write_bytes(shard.read_bytes()[:-1])

        with pytest.raises(ApplianceError) as raised:
            reader.array(reader.names()[0])

        shard.unlink()
        with pytest.raises(ApplianceError) as gone:
            reader.array(reader.names()[0])

    assert raised.value.faults[0].code == "E_TRUNCATED"
    assert gone.value.faults[0].code == "E_UNREADABLE"


def test_quantize_small_file_that_cannot_be_read_blames_the_source(
    llama: Any, tmp_path: Path
) -> None:
    source = llama.write(tmp_path / "src")
    (source / "notes.txt").symlink_to("/proc/self/mem")  # its first page is never mapped

    error = refusal(source, tmp_path / "dst")

    assert (error.exit_code, codes(error)) == (
        ExitCode.CHECKPOINT_UNSUPPORTED,
        {"E_UNREADABLE"},
    )
    assert error.faults[0].where == str(source / "notes.txt")


def test_quantize_tokenizer_that_is_a_link_to_nowhere_is_not_left_out(
    llama: Any, tmp_path: Path
) -> None:
    source = llama.write(tmp_path / "src")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to("../blobs/gone")

    error = refusal(source, tmp_path / "dst")

    assert codes(error) == {"E_UNREADABLE"}
