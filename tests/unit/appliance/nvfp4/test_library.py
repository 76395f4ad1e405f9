"""Loading a kernel library and turning its refusals into errors."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from appliance.errors import ExitCode, Fault
from appliance.nvfp4 import abi
from appliance.nvfp4.error import refused
from appliance.nvfp4.library import Library, LibraryError, reference_library

if TYPE_CHECKING:
    from pathlib import Path


def _build(folder: Path, source: str) -> Path:
    (folder / "wrong.c").write_text(source)
    path = folder / "libwrong.so"
    subprocess.run(("gcc", "-shared", "-fPIC", folder / "wrong.c", "-o", path), check=True)
    return path


@pytest.mark.parametrize(
    ("name", "command"), [("libnvfp4_ref.so", "make native"), ("libnvfp4_sm70.so", "make kernels")]
)
def test_library_that_is_not_built_says_how_to_build_it(
    name: str, command: str, tmp_path: Path
) -> None:
    with pytest.raises(LibraryError) as error:
        Library(tmp_path / name)

    assert error.value.exit_code == ExitCode.ENGINE_START
    assert error.value.faults[0].code == "NVFP4_LIBRARY_MISSING"
    assert command in str(error.value)


def test_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libnvfp4_ref.so"
    path.write_bytes(b"no ELF file")

    with pytest.raises(LibraryError, match=r"error\[NVFP4_LIBRARY_UNLOADABLE\]"):
        Library(path)


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("int other(void) { return 0; }", "no version"),
        ("unsigned nvfp4_abi_version(void) { return 0x00020000u; }", "got 2.0"),
        ("unsigned nvfp4_abi_version(void) { return 0x00000007u; }", "got 0.7"),
        ("unsigned nvfp4_abi_version(void) { return 0x00010005u; }", "no nvfp4_weight_bytes"),
    ],
)
def test_library_of_another_abi_is_refused(source: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=r"error\[NVFP4_ABI\]") as error:
        Library(_build(tmp_path, source))

    assert value in str(error.value)


def test_refusal_carries_the_status_the_sentence_and_the_function() -> None:
    desc = abi.WeightDesc(kind=1, experts=1, n=8, k=24, group=16, scale_type=3, global_kind=1)

    with pytest.raises(LibraryError) as error:
        reference_library().weight_bytes(desc)

    assert error.value.status == abi.Status.ESHAPE
    assert error.value.exit_code == ExitCode.BUG
    assert error.value.faults == (
        Fault(
            "NVFP4_ESHAPE",
            "nvfp4_weight_bytes",
            "the kernel library must take the call",
            "'k must be a multiple of 16, is 24'",
            "report it with this line, the call is the appliance's own",
        ),
    )


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [
        (abi.Status.ESCALE_NAN, "NVFP4_ESCALE_NAN", ExitCode.CHECKPOINT_CORRUPT),
        (abi.Status.ESCALE_NEGATIVE, "NVFP4_ESCALE_NEGATIVE", ExitCode.CHECKPOINT_CORRUPT),
        (abi.Status.EGLOBAL, "NVFP4_EGLOBAL", ExitCode.CHECKPOINT_CORRUPT),
        (abi.Status.EUNSUPPORTED, "NVFP4_EUNSUPPORTED", ExitCode.CHECKPOINT_UNSUPPORTED),
        (abi.Status.EDEVICE, "NVFP4_EDEVICE", ExitCode.GPU_FAULT),
        (abi.Status.ESELFTEST, "NVFP4_ESELFTEST", ExitCode.GPU_FAULT),
        (abi.Status.EALIGN, "NVFP4_EALIGN", ExitCode.BUG),
        (99, "NVFP4_EUNKNOWN", ExitCode.BUG),
    ],
)
def test_refusal_of_each_kind_has_its_exit_code(
    status: int, code: str, exit_code: ExitCode
) -> None:
    error = refused("nvfp4_repack", status, "A sentence.")

    assert error.exit_code == exit_code
    assert error.faults[0].code == code


def test_refusal_moved_to_a_tensor_keeps_the_rest() -> None:
    error = refused("nvfp4_repack", abi.Status.ESCALE_NAN, "3 block scales are NaN.")

    moved = error.at("model.layers.0.mlp.down_proj")

    assert moved.status == abi.Status.ESCALE_NAN
    assert moved.exit_code == error.exit_code
    assert str(moved).startswith("error[NVFP4_ESCALE_NAN] model.layers.0.mlp.down_proj: ")


def test_sized_struct_knows_its_size_and_refuses_unknown_fields() -> None:
    assert abi.Problem(m=3).struct_size == 56
    with pytest.raises(TypeError, match="Problem has no field rows"):
        abi.Problem(rows=3)
