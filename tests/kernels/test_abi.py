"""The header, the binding and the library say the same."""

from __future__ import annotations

import ctypes
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from appliance.nvfp4 import abi, attention, gdn
from appliance.nvfp4.library import LIBRARY_DIR
from appliance.nvfp4.loading import SIGNATURES

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.nvfp4.library import Library

STRUCTS = {
    "nvfp4_weight_desc": abi.WeightDesc,
    "nvfp4_weight": abi.Weight,
    "nvfp4_source": abi.Source,
    "nvfp4_report": abi.Report,
    "nvfp4_problem": abi.Problem,
    "nvfp4_choice": abi.Choice,
    "nvfp4_norm": abi.Norm,
    "nvfp4_rotary": abi.Rotary,
    "nvfp4_attention": attention.Attention,
    "nvfp4_cache_rows": attention.CacheRows,
    "nvfp4_conv": gdn.Conv,
    "nvfp4_delta": gdn.Delta,
    "nvfp4_gate_norm": gdn.GateNorm,
    "nvfp4_self_test_result": abi.SelfTestResult,
}
ENUMS = {
    "NVFP4_": (abi.Status, abi.Type),
    "NVFP4_GLOBAL_": (abi.GlobalKind,),
    "NVFP4_DEQUANTIZE_": (abi.Dequantize,),
    "NVFP4_KERNEL_": (abi.Kernel,),
    "NVFP4_GATE_": (gdn.Gate,),
}


@pytest.fixture(scope="module")
def header(repository: Path) -> Path:
    return repository / "kernels" / "include" / "nvfp4.h"


@pytest.fixture(scope="module")
def declarations(header: Path) -> str:
    """Text of the header and of the parts that it includes."""
    parts = sorted(header.parent.glob("nvfp4*.h"))
    return "".join(part.read_text() for part in parts)


def _answers(header: Path, folder: Path, questions: dict[str, str]) -> dict[str, int]:
    """Values of C expressions, as a C compiler sees them."""
    lines = "".join(
        f'  printf("%s %lld\\n", "{name}", (long long)({text}));\n'
        for name, text in questions.items()
    )
    source = folder / "ask.c"
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{header}"\n'
        f"int main(void) {{\n{lines}  return 0;\n}}\n"
    )
    program = folder / "ask"
    subprocess.run(
        ("gcc", "-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", source, "-o", program),
        check=True,
    )
    output = subprocess.run((program,), check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split() for line in output.splitlines())}


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_struct_of_the_binding_has_the_layout_of_the_header(
    name: str, header: Path, tmp_path: Path
) -> None:
    struct_ = STRUCTS[name]
    fields = [field[0] for field in struct_._fields_]
    questions = {"size": f"sizeof({name})"}
    for field in fields:
        questions[f"offset.{field}"] = f"offsetof({name}, {field})"
        questions[f"size.{field}"] = f"sizeof((({name}*)0)->{field})"

    found = _answers(header, tmp_path, questions)

    expected = {"size": ctypes.sizeof(struct_)}
    for field in fields:
        expected[f"offset.{field}"] = getattr(struct_, field).offset
        expected[f"size.{field}"] = getattr(struct_, field).size
    assert found == expected


def test_numbers_of_the_binding_are_those_of_the_header(header: Path, tmp_path: Path) -> None:
    expected = {
        f"{prefix}{member.name}": member.value
        for prefix, enums in ENUMS.items()
        for enum in enums
        for member in enum
        if member.name != "NONE"
    }
    expected |= {
        "NVFP4_LINEAR": abi.WeightKind.LINEAR,
        "NVFP4_GATE_UP": abi.WeightKind.GATE_UP,
        "NVFP4_STATUS_COUNT": len(abi.Status),
        "NVFP4_ABI_VERSION": abi.ABI_VERSION,
        "NVFP4_BUFFER_ALIGNMENT": abi.BUFFER_ALIGNMENT,
        "NVFP4_WORKSPACE_LIMIT_BYTES": abi.WORKSPACE_LIMIT_BYTES,
    }

    assert _answers(header, tmp_path, {name: name for name in expected}) == expected


def test_header_compiles_as_cxx(header: Path, tmp_path: Path) -> None:
    source = tmp_path / "use.cpp"
    source.write_text(f'#include "{header}"\nint main() {{ return nvfp4_matmul == nullptr; }}\n')

    subprocess.run(
        ("g++", "-std=c++17", "-Wall", "-Wextra", "-pedantic", "-fsyntax-only", source), check=True
    )


def test_every_function_of_the_header_is_bound_with_its_arguments(declarations: str) -> None:
    text = re.sub(r"/\*.*?\*/", "", declarations, flags=re.DOTALL)
    declared = {
        name: 0 if arguments.strip() == "void" else arguments.count(",") + 1
        for name, arguments in re.findall(r"NVFP4_API nvfp4_status (\w+)\(([^)]*)\)", text)
    }

    assert declared == {name: len(types) for name, types in SIGNATURES.items()}


def test_library_exports_the_functions_of_the_header_and_nothing_else(
    declarations: str, reference: Library
) -> None:
    declared = set(re.findall(r"NVFP4_API [^(;]*?(nvfp4_\w+)\(", declarations))

    listing = subprocess.run(
        ("nm", "--dynamic", "--defined-only", reference.path),
        check=True,
        capture_output=True,
        text=True,
    ).stdout

    assert {line.split()[-1] for line in listing.splitlines()} == declared


def test_library_needs_no_runtime_beyond_libc(reference: Library) -> None:
    listing = subprocess.run(
        ("readelf", "--dynamic", reference.path), check=True, capture_output=True, text=True
    ).stdout

    needed = set(re.findall(r"NEEDED.*\[(.*)\]", listing))
    assert needed <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "libpthread.so.0"}


def test_statuses_of_the_library_have_names_and_sentences(reference: Library) -> None:
    dll = reference._dll
    dll.nvfp4_status_name.restype = ctypes.c_char_p
    dll.nvfp4_status_text.restype = ctypes.c_char_p

    names = [dll.nvfp4_status_name(status).decode() for status in abi.Status]
    texts = [dll.nvfp4_status_text(status).decode() for status in abi.Status]

    assert names == [f"NVFP4_{status.name}" for status in abi.Status]
    assert len(set(texts)) == len(texts)
    assert all(text.endswith(".") for text in texts)
    assert dll.nvfp4_status_name(len(abi.Status)) == b"NVFP4_EUNKNOWN"
    assert dll.nvfp4_status_name(-1) == b"NVFP4_EUNKNOWN"


def test_library_lies_beside_the_package_and_names_its_build(reference: Library) -> None:
    assert reference.path.parent == LIBRARY_DIR
    assert reference.build_info().startswith("libnvfp4_ref ")
    assert reference.kernel_name(99) == "unknown"
