"""Dynamic shared memory of the products, from the constexpr functions of their own headers.

The size is an argument of a launch, so it is not in the machine code. A probe is compiled that
prints what the sources compute for the template arguments found in the library: nothing is stated
twice.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from machine_code import PATH, AuditError, Kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADERS = (
    *("sm70_nvfp4_skinny.cuh", "sm70_nvfp4_skinny_wide.cuh", "sm70_nvfp4_tensor.cuh"),
    *("sm70_attention_prefill.cuh", "sm70_gdn_prepare.cuh", "sm70_gdn_chunk.cuh"),
)
# Kernel -> the function of its header, and which template arguments of the kernel it takes.
FUNCTIONS = {
    "SkinnyKernel": ("SkinnySharedBytes", slice(0, 3)),
    "SkinnyWideKernel": ("WideSharedBytes", slice(0, 4)),
    "TensorKernel": ("TensorSharedBytes", slice(0, 1)),
    "AttentionPrefillKernel": ("PrefillSharedBytes", slice(0, 1)),
    "DeltaPrepareKernel": ("PrepareSharedBytes", slice(0, 1)),
    "DeltaChunkKernel": ("ChunkSharedBytes", slice(0, 1)),
}


def dynamic_shared(kernels: Sequence[Kernel], sources: Path, nvcc: str, host: str) -> list[int]:
    """Bytes of dynamic shared memory for each kernel; 0 where no function is stated.

    Raises:
        AuditError: If the probe does not compile: a header has changed its function.
    """
    lines = [_line(kernel) for kernel in kernels]
    program = "".join(f'#include "{name}"\n' for name in HEADERS)
    program += "#include <cstdio>\nint main() {\n" + "\n".join(lines) + "\n}\n"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "probe.cu"), Path(folder, "probe")
        source.write_text(program)
        root = sources.parent
        includes = [f"-I{path}" for path in (sources, root / "include", root / "common")]
        # Host code only: nothing of the kernels themselves is compiled.
        _run(
            *(nvcc, "-ccbin", host, "-std=c++17", "-O0", "-arch=sm_70", "-w", *includes),
            *("-o", str(binary), str(source)),
        )
        return [int(line) for line in _run(str(binary)).split()]


def _line(kernel: Kernel) -> str:
    value = "0"
    if kernel.name in FUNCTIONS:
        function, taken = FUNCTIONS[kernel.name]
        value = f"nvfp4::{function}<{', '.join(kernel.arguments[taken])}>()"
    return f'  std::printf("%d\\n", static_cast<int>({value}));'


def _run(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={"PATH": PATH}
        )
    except OSError as error:
        raise AuditError(f"{command[0]} cannot run: {error}") from error
    if done.returncode != 0:
        raise AuditError(f"the probe of shared memory failed: {done.stderr.strip()[:800]}")
    return done.stdout
