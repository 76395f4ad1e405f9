"""What the machine code of each kernel has to be, and the table it is printed as."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from machine_code import Code

if TYPE_CHECKING:
    from machine_code import Kernel

# Of a multiprocessor of sm_70.
REGISTERS, WARPS, SHARED_BYTES, CTAS = 65536, 64, 98304, 32
QUARTER_REGISTERS = REGISTERS // 4  # of one scheduler
WARP_REGISTER_UNIT, SHARED_UNIT = 256, 256
# Registers a thread: a product may take what its launch bounds leave; the others stay light, but
# for the one that holds two records in flight.
LIGHT_REGISTERS = 64
MOST_REGISTERS = {"DequantizeHalf": 128, "DeltaStepsKernel": 128}
SKINNY = ("SkinnyKernel", "SkinnyWideKernel", "TokenDownKernel")
PRODUCTS = (*SKINNY, "TensorKernel")
ATTENTION = ("AttentionDecodeKernel", "AttentionPrefillKernel")
DELTA = ("DeltaPrepareKernel", "DeltaChunkKernel")
# Their sums must not depend on the order of arrival.
ORDERED = (
    *(*PRODUCTS, *ATTENTION, *DELTA, "DeltaStepsKernel"),
    *("ReduceKernel", "CombineKernel", "FixUpKernel", "AttentionCombineKernel"),
    "AttentionTileCombineKernel",
)
# Tiles of eight tokens -> SASS instructions for eight weights of a lane.
MOST_PER_EIGHT = {1: 36.0, 2: 42.0, 4: 63.0}
# mma.m8n8k4 with FP32 sums is four HMMA.884; two of them take a warp's 32 columns times 8 k.
HMMA_PER_EIGHT = 8
HMMA_OF_PRODUCT = 4
FIRST_CACHE = 768  # instructions
# 16 bytes are four times eight weights.
EIGHTS_PER_LOAD = 4


@dataclass(frozen=True)
class Finding:
    """One kernel with what its design follows from."""

    kernel: Kernel
    dynamic_shared: int

    @property
    def is_product(self) -> bool:
        """One of the matmul kernels."""
        return self.kernel.name in PRODUCTS

    @property
    def is_attention(self) -> bool:
        """One of the attention kernels with tensor-core products."""
        return self.kernel.name in ATTENTION

    @property
    def is_delta(self) -> bool:
        """One of the kernels that take the gated delta rule in chunks."""
        return self.kernel.name in DELTA

    @property
    def token_tiles(self) -> int:
        """Eights of tokens that a CTA of a product computes."""
        return int(self.kernel.arguments[0])

    @property
    def has_float_scales(self) -> bool:
        """The second instantiation, whose scales are FP32 words."""
        return "true" in self.kernel.arguments

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.kernel.static_shared + self.dynamic_shared

    @cached_property
    def loop(self) -> Code:
        """The main loop: of the innermost loops with products, the one with most of them."""
        return max(self.kernel.code.loops("HMMA"), key=lambda c: c.count("HMMA"), default=Code())

    @property
    def eights(self) -> float:
        """Eight weights of a lane, decoded in one pass of the main loop."""
        return self.loop.count("HMMA") / (HMMA_PER_EIGHT * self.token_tiles)

    @property
    def per_eight(self) -> float:
        """SASS instructions of the main loop for eight weights of a lane."""
        return len(self.loop) / self.eights if self.eights else 0.0

    @property
    def resident(self) -> int:
        """CTAs of a multiprocessor that registers, shared memory and warps allow; 0 = unknown."""
        if not self.kernel.threads:
            return 0
        warps = -(-self.kernel.threads // 32)
        unit = WARP_REGISTER_UNIT
        warp_registers = -(-self.kernel.registers * 32 // unit) * unit
        by_registers = QUARTER_REGISTERS // warp_registers * 4 // warps
        shared = -(-self.shared // SHARED_UNIT) * SHARED_UNIT
        by_shared = SHARED_BYTES // shared if shared else CTAS
        return min(by_registers, by_shared, WARPS // warps, CTAS)


def faults_of(finding: Finding) -> list[str]:
    """Every broken rule, in words."""
    faults = _faults_of_targets(finding) + _faults_of_resources(finding)
    kernel = finding.kernel
    if kernel.name in ORDERED and kernel.code.count(r"(RED|ATOM)"):
        faults.append("RED or ATOM where sums must keep their order")
    if finding.is_product and kernel.code:
        faults += _faults_of_loop(finding)
    elif finding.is_attention and kernel.code:
        faults += _faults_of_attention(finding)
    elif finding.is_delta and kernel.code:
        faults += _faults_of_delta(finding)
    elif kernel.code.count("HMMA"):
        faults.append("HMMA outside of the products")
    return faults


def _faults_of_targets(finding: Finding) -> list[str]:
    """sm_70 machine code and compute_70 PTX, and nothing else."""
    faults: list[str] = []
    if finding.kernel.machines != {"sm_70"}:
        found = ", ".join(sorted(finding.kernel.machines)) or "nothing"
        faults.append(f"machine code for {found}, not sm_70 alone")
    if finding.kernel.ptx != {"compute_70"}:
        found = ", ".join(sorted(finding.kernel.ptx)) or "nothing"
        faults.append(f"PTX for {found}, not compute_70 alone")
    return faults


def _faults_of_resources(finding: Finding) -> list[str]:
    kernel = finding.kernel
    faults: list[str] = []
    spilled = kernel.code.count("(LDL|STL)")
    if spilled:
        faults.append(f"{spilled} local loads and stores")
    if kernel.stack or kernel.local:
        faults.append(f"{kernel.stack} bytes of stack and {kernel.local} of local memory")
    most = MOST_REGISTERS.get(kernel.name, LIGHT_REGISTERS)
    is_light = not (finding.is_product or finding.is_attention or finding.is_delta)
    if is_light and kernel.registers > most:
        faults.append(f"{kernel.registers} registers, more than {most}")
    if finding.shared > SHARED_BYTES // kernel.ctas:
        faults.append(f"{finding.shared} bytes of shared memory, too many for {kernel.ctas} CTAs")
    if kernel.threads and finding.resident < kernel.ctas:
        faults.append(f"{finding.resident} CTAs fit a multiprocessor, not {kernel.ctas}")
    return faults


def _faults_of_loop(finding: Finding) -> list[str]:
    kernel, loop = finding.kernel, finding.loop
    faults: list[str] = []
    if not loop:
        return ["no loop with tensor-core products"]
    if kernel.code.count("HMMA") != kernel.code.count(r"HMMA\.884"):
        faults.append("tensor-core products other than HMMA.884")
    if finding.eights != int(finding.eights):
        faults.append(f"{loop.count('HMMA')} HMMA.884 in the loop: no whole number of tiles")
    wide = loop.count(r"LDG\.E\.128")
    if wide < finding.eights / EIGHTS_PER_LOAD:
        faults.append(f"{wide} LDG.E.128 in the loop for {finding.eights:.0f} times 8 weights")
    if kernel.name in SKINNY:
        if any(each.count("BAR") for each in kernel.code.loops("HMMA")):
            faults.append("a barrier in the main loop")
        # FP32 scales multiply sums: their bound is the golden file.
        limit = MOST_PER_EIGHT.get(finding.token_tiles)
        if limit is None:
            faults.append(f"{finding.token_tiles} token tiles have no bound")
        elif not finding.has_float_scales and finding.per_eight > limit:
            faults.append(f"{finding.per_eight:.1f} instructions for 8 weights, over {limit:.0f}")
    return faults


def _faults_of_attention(finding: Finding) -> list[str]:
    """A step of keys takes the products and the loads that its sizes say, and no more."""
    code, loop, head_dim = finding.kernel.code, finding.loop, int(finding.kernel.arguments[0])
    faults: list[str] = []
    if code.count("HMMA") != code.count(r"HMMA\.884"):
        faults.append("tensor-core products other than HMMA.884")
    if finding.kernel.name == "AttentionDecodeKernel":
        # 32 keys: head_dim / 4 products of scores and as many of sums, four HMMA each, for every
        # tile of rows; a lane loads 16 bytes of each key and value head_dim / 8 times.
        products, wide = 2 * head_dim * int(finding.kernel.arguments[1]), head_dim // 4
        found = loop.count("HMMA"), loop.count(r"LDG\.E\.128")
        if loop.count("BAR"):
            faults.append("a barrier in the main loop")
    else:
        # Scores of 16 keys by 16 of the head, in a loop; sums of 16 keys by up to 128 of the head.
        products, wide = 32 + 32 * min(head_dim // 16, 8), 8
        found = code.count("HMMA"), min(code.count(r"LDG\.E\.128"), wide)
    if found != (products, wide):
        faults.append(
            f"{found[0]} HMMA.884 and {found[1]} LDG.E.128 for a step, not {products} and {wide}"
        )
    return faults


def _faults_of_delta(finding: Finding) -> list[str]:
    """Rolled loops that keep to the instruction cache, with the products that their sizes say."""
    code, k_dim = finding.kernel.code, int(finding.kernel.arguments[0])
    faults: list[str] = []
    if code.count("HMMA") != code.count(r"HMMA\.884"):
        faults.append("tensor-core products other than HMMA.884")
    if finding.kernel.name == "DeltaPrepareKernel":
        # Two tiles of a warp; 32 of the head by keys and by queries, eight products each, in a loop.
        products = 2 * 2 * 8 * HMMA_OF_PRODUCT
    else:
        # 32 of the head by keys and by queries; two squares of 64; four tokens into each tile of
        # the state, four times.
        products = (2 * 8 + 2 * 16 + 4 * k_dim // 64) * HMMA_OF_PRODUCT
        longest = max(map(len, code.loops("BAR")), default=0)
        if longest > FIRST_CACHE:
            faults.append(f"a loop of {longest} instructions, more than {FIRST_CACHE}")
    if code.count("HMMA") != products:
        faults.append(f"{code.count('HMMA')} HMMA.884, not {products}")
    return faults


COLUMNS = (
    ("regs", 5),
    ("smem", 6),
    ("CTAs", 5),
    ("warps", 6),
    ("code", 6),
    ("loop", 6),
    ("HMMA", 5),
    ("LDG128", 7),
    ("LDG", 4),
    ("BAR", 4),
    ("/8w", 6),
)
HEADING = """\
Machine code of libnvfp4_sm70.so for sm_70. regs: registers a thread; smem: bytes of shared memory
of a CTA; CTAs, warps: resident on a multiprocessor; code, loop: instructions of the kernel and of
its main loop; HMMA, LDG128, LDG, BAR: HMMA.884, 16-byte and other global loads, barriers, in the
main loop or else in the kernel; /8w: instructions of the main loop for eight weights of a lane.
"""


def table_of(findings: list[Finding]) -> str:
    """One line a kernel."""
    width = max(len(each.kernel.title) for each in findings)
    head = f"{'kernel':{width}}" + "".join(f"{name:>{size}}" for name, size in COLUMNS)
    return "\n".join([HEADING, head, *(_line(each, width) for each in findings)]) + "\n"


def _line(finding: Finding, width: int) -> str:
    kernel, loop = finding.kernel, finding.loop
    counted = loop or kernel.code
    warps = finding.resident * -(-kernel.threads // 32)
    cells = (
        str(kernel.registers),
        str(finding.shared),
        str(finding.resident or "-"),
        str(warps or "-"),
        str(len(kernel.code)),
        str(len(loop) or "-"),
        str(counted.count(r"HMMA\.884") or "-"),
        str(counted.count(r"LDG\.E\.128") or "-"),
        str(counted.count(r"LDG(?!\.E\.128)") or "-"),
        str(counted.count("BAR") or "-"),
        f"{finding.per_eight:.1f}" if finding.is_product else "-",
    )
    sized = zip(cells, (size for _, size in COLUMNS), strict=True)
    return f"{kernel.title:{width}}" + "".join(f"{cell:>{size}}" for cell, size in sized)
