"""Every parser under changed and hostile bytes: no crash, no hang, no memory beyond the file's.

`pytest` runs fixed examples of each family. `make fuzz MINUTES=10` runs this file as a script:
fresh examples for so many minutes a family.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from appliance.checkpoint.header import HeaderError
from appliance.checkpoint.template import TemplateProblem
from appliance.errors import ApplianceError


def _neighbour(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


families = _neighbour("fuzz_families").families
Family = Any

SECONDS_MAX = 5.0
"""Processor time of one example; the slowest legitimate one takes a tenth of a second."""

TIMES_THE_FILE = 4
ROOM = 8 * 1024**2
"""Memory that parsing takes whatever the file's size: caches, messages, numpy's own."""

TOKENS = [
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"true", b"-1", b"1e999", b"NaN"),
    *(b"18446744073709551615", b"9223372036854775808", b"-0", b"1.5", b'"\\ud800"', b'"\\u0000"'),
    *(b"../../etc/passwd", b"/dev/zero", b"model.safetensors", b"\xff\xfe", b"\x00" * 9),
    *(b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"F8_E4M3", b"F4", b"re:(.*)*x", b"re:["),
    *(b"data_offsets", b"quantization_config", b"weight_scale", b"num_hidden_layers"),
]
NUMBERS = [0, 1, 7, 8, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]

EDIT = st.one_of(
    st.tuples(st.just("bit"), st.floats(0, 1), st.integers(0, 7)),
    st.tuples(st.just("byte"), st.floats(0, 1), st.integers(0, 255)),
    st.tuples(st.just("word"), st.floats(0, 1), st.sampled_from(NUMBERS)),
    st.tuples(st.just("token"), st.floats(0, 1), st.sampled_from(TOKENS)),
    st.tuples(st.just("cut"), st.floats(0, 1), st.floats(0, 1)),
    st.tuples(st.just("repeat"), st.floats(0, 1), st.floats(0, 0.2)),
    st.tuples(st.just("drop"), st.floats(0, 1), st.floats(0, 0.2)),
)


def changed(seed: bytes, edits: list[tuple[str, float, object]]) -> bytes:
    """Apply edits to bytes, one after the other."""
    data = bytearray(seed)
    for kind, place, value in edits:
        at = int(place * len(data))
        if kind == "bit" and at < len(data):
            data[at] ^= 1 << value
        elif kind == "byte" and at < len(data):
            data[at] = value
        elif kind == "word":
            size = 4 if value < 2**32 else 8
            data[at : at + size] = value.to_bytes(size, "little")
        elif kind == "token":
            data[at:at] = value
        elif kind == "cut":
            del data[int(value * len(data)) :]
        elif kind == "repeat":
            data[at:at] = data[at : at + int(value * len(data))]
        elif kind == "drop":
            del data[at : at + int(value * len(data))]
    return bytes(data[: 4 * 1024**2])


@contextlib.contextmanager
def bounded(root: Path) -> Iterator[None]:
    """Hold one example to its time and memory."""
    size = sum(path.stat().st_size for path in root.iterdir() if path.is_file())
    tracemalloc.start()
    begun = time.process_time()
    try:
        yield
    except (ApplianceError, HeaderError, TemplateProblem):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.process_time() - begun < SECONDS_MAX
    assert peak <= TIMES_THE_FILE * size + ROOM, (peak, size)


def run_one(family: Family, root: Path, name: str, edits: list, mend: bool) -> None:
    for other, data in family.seeds.items():
        family.write(root, other, data, False)
    family.write(root, name, changed(family.seeds[name], edits), mend)
    with bounded(root):
        family.parse(root)


def fuzz(family: Family, settings: hypothesis.settings) -> None:
    """Run examples of one family until the settings have enough."""
    with tempfile.TemporaryDirectory() as place:

        @settings
        @hypothesis.given(
            name=st.sampled_from(sorted(family.seeds)),
            edits=st.lists(EDIT, max_size=6),
            mend=st.booleans(),
        )
        def run(name: str, edits: list, mend: bool) -> None:
            run_one(family, Path(place), name, edits, mend)

        run()


QUIET = (hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large)


@pytest.mark.parametrize("name", sorted(families()))
def test_parser_survives_changed_bytes(name: str) -> None:
    settings = hypothesis.settings(
        max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=QUIET
    )
    family = families()[name]()
    with tempfile.TemporaryDirectory() as place:
        family_parses(family, Path(place))

    fuzz(family, settings)


def family_parses(family: Family, root: Path) -> None:
    """The seeds themselves are sound: what is changed would be read otherwise."""
    for name, data in family.seeds.items():
        family.write(root, name, data, False)
    if "SHA256SUMS" not in family.seeds:
        family.parse(root)


def main() -> int:
    """Run families for some minutes each; prints one line a family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--family", action="append", choices=sorted(families()))
    arguments = parser.parse_args()
    for name in arguments.family or sorted(families()):
        family, runs, begun = families()[name](), 0, time.monotonic()
        while time.monotonic() - begun < arguments.minutes * 60:
            settings = hypothesis.settings(
                max_examples=500, deadline=None, database=None, suppress_health_check=QUIET
            )
            fuzz(family, settings)
            runs += 500
        elapsed = time.monotonic() - begun
        sys.stdout.write(f"{name}: {runs} examples in {elapsed:.0f} s, no fault\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
