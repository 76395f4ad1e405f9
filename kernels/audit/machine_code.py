"""What cuobjdump says about each kernel of a library: targets, resources, instructions."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# A newer CUDA in the usual PATH does not know sm_70.
PATH = "/usr/bin:/bin"
_HEADS = re.compile(r"^Fatbin (elf|ptx) code:|^arch = (sm_\d+)|^\s*Function : (\S+)", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;", re.MULTILINE)
_ENTRY = re.compile(r"\.entry (\w+)\(.*?\)(.*?)\{", re.DOTALL)
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")


class AuditError(Exception):
    """The library or a tool could not be read; one sentence."""


@dataclass(frozen=True)
class Instruction:
    """One line of SASS."""

    address: int
    text: str

    @property
    def word(self) -> str:
        """The operation with its modifiers, without predicate and operands."""
        return _PREDICATE.sub("", self.text).split()[0]

    @property
    def jump(self) -> int | None:
        """Where a branch goes; None for any other instruction."""
        found = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", self.text)
        return int(found[1], 16) if found else None


@dataclass(frozen=True)
class Code:
    """Instructions in order of address."""

    instructions: tuple[Instruction, ...] = ()

    def __len__(self) -> int:
        """Return the number of instructions."""
        return len(self.instructions)

    def count(self, pattern: str) -> int:
        """Instructions whose operation begins with the pattern, which is a regular expression."""
        words = Counter(each.word for each in self.instructions)
        return sum(times for word, times in words.items() if re.match(pattern, word))

    def loops(self, pattern: str) -> list[Code]:
        """Innermost loops, each the body of a backward branch, that hold such an instruction."""
        spans: list[tuple[int, int]] = []
        for each in self.instructions:
            target = each.jump
            # A branch to itself is the trap after the end of a kernel.
            if target is not None and target < each.address:
                spans.append((target, each.address))
        bodies = {span: self._between(*span) for span in spans}
        holding = [span for span, body in bodies.items() if body.count(pattern)]
        return [
            bodies[span]
            for span in holding
            if not any(o != span and span[0] <= o[0] and o[1] <= span[1] for o in holding)
        ]

    def _between(self, first: int, last: int) -> Code:
        return Code(tuple(i for i in self.instructions if first <= i.address <= last))


@dataclass
class Kernel:
    """One `__global__` function with everything that the library holds of it."""

    symbol: str
    name: str
    arguments: tuple[str, ...]
    machines: set[str] = field(default_factory=set)  # sm_NN with SASS
    ptx: set[str] = field(default_factory=set)  # .target of its PTX
    code: Code = field(default_factory=Code)  # of sm_70
    registers: int = 0
    stack: int = 0
    local: int = 0
    static_shared: int = 0
    threads: int = 0  # of a CTA at most; 0 = not stated
    ctas: int = 1  # of a multiprocessor at least, as the source asks

    @property
    def title(self) -> str:
        """Name and template arguments as in the source."""
        return f"{self.name}<{','.join(self.arguments)}>" if self.arguments else self.name


def read_kernels(library: Path) -> list[Kernel]:
    """Every kernel of a library or object file, sorted by title.

    Raises:
        AuditError: If a tool is missing, fails, or finds no device code.
    """
    kernels: dict[str, Kernel] = {}
    _read_machine_code(library, kernels)
    _read_ptx(library, kernels)
    _read_resources(library, kernels)
    if not kernels:
        raise AuditError(f"{library} holds no kernel")
    for kernel, text in zip(kernels.values(), _demangled(list(kernels)), strict=True):
        kernel.name, kernel.arguments = _name_of(text)
    return sorted(kernels.values(), key=lambda kernel: (kernel.name, kernel.arguments))


def _read_machine_code(library: Path, kernels: dict[str, Kernel]) -> None:
    text = _tool("cuobjdump", "-sass", str(library))
    arch = ""
    heads = list(_HEADS.finditer(text))
    for index, head in enumerate(heads):
        arch = head[2] or arch
        if head[3]:
            end = heads[index + 1].start() if index + 1 < len(heads) else len(text)
            kernel = _of(kernels, head[3])
            kernel.machines.add(arch)
            if arch == "sm_70":
                found = _INSTRUCTION.findall(text, head.end(), end)
                kernel.code = Code(tuple(Instruction(int(at, 16), words) for at, words in found))


def _read_ptx(library: Path, kernels: dict[str, Kernel]) -> None:
    for part in _tool("cuobjdump", "-ptx", str(library)).split("Fatbin ptx code:")[1:]:
        target = re.search(r"^\.target (sm_\d+)", part, re.MULTILINE)
        for symbol, directives in _ENTRY.findall(part):
            kernel = _of(kernels, symbol)
            kernel.ptx.add(target[1].replace("sm_", "compute_") if target else "unknown")
            threads = re.search(r"\.maxntid (\d+), (\d+), (\d+)", directives)
            ctas = re.search(r"\.minnctapersm (\d+)", directives)
            if threads:
                kernel.threads = int(threads[1]) * int(threads[2]) * int(threads[3])
            kernel.ctas = int(ctas[1]) if ctas else 1


def _read_resources(library: Path, kernels: dict[str, Kernel]) -> None:
    text = _tool("cuobjdump", "-res-usage", "-arch", "sm_70", str(library))
    for symbol, line in re.findall(r"Function (\S+):\s*\n\s*(REG:.*)", text):
        usage = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
        kernel = _of(kernels, symbol)
        kernel.registers, kernel.stack = usage["REG"], usage["STACK"]
        kernel.local, kernel.static_shared = usage["LOCAL"], usage["SHARED"]


def _of(kernels: dict[str, Kernel], symbol: str) -> Kernel:
    return kernels.setdefault(symbol, Kernel(symbol, symbol, ()))


def _demangled(symbols: list[str]) -> list[str]:
    return _tool("c++filt", *symbols).splitlines()


def _name_of(text: str) -> tuple[str, tuple[str, ...]]:
    """`void ns::Name<1, false, (ns::Mode)0>(ns::Args)` -> ("Name", ("1", "false", "0"))."""
    flat = text.replace("(anonymous namespace)::", "")
    flat = re.sub(r"\([\w:]+\)(\d+)", r"\1", flat)
    found = re.match(r"(?:[\w:]+ )?(?:\w+::)*(\w+)(?:<(.*?)>)?(?:\(|$)", flat)
    if not found:
        raise AuditError(f"no name of a kernel in {text}")
    arguments = [each.strip().replace("__half", "half") for each in (found[2] or "").split(",")]
    return found[1], tuple(each for each in arguments if each)


def _tool(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={"PATH": PATH}
        )
    except OSError as error:
        raise AuditError(f"{command[0]} cannot run: {error}") from error
    # Without SASS, or without PTX, cuobjdump says so and fails; that is a finding, not an error.
    if done.returncode != 0 and "does not contain device code" not in done.stderr + done.stdout:
        raise AuditError(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[:400]}")
    return done.stdout
