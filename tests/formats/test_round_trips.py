"""Write, read, equal: any rows, columns, groups and number of parts, in every layout."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np

from appliance.checkpoint.container import check_payload, read_container
from appliance.checkpoint.container_arrays import ContainerReader
from appliance.checkpoint.container_writer import ContainerEntry, write_container
from appliance.checkpoint.decode import open_matrix
from appliance.checkpoint.gguf_nvfp4 import unpack_blocks
from appliance.checkpoint.stored import find_stored
from appliance.checkpoint.tensors import open_tensors
from appliance.checkpoint.writer import ShardWriter, TensorSpec, plan_shards, write_index
from appliance.nvfp4 import packing

Tensors = dict[str, tuple[str, np.ndarray]]

SETTINGS = hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
SIZES = st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**32))


def random_codes(generator: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return generator.integers(0, 256, (rows, columns // 2), dtype=np.uint8)


def oracle(codes: np.ndarray, scales: np.ndarray, factor: float, *, divides: bool) -> np.ndarray:
    """Decode with the types of ml_dtypes in FP64 and round once."""
    nibbles = np.stack((codes & 0xF, codes >> 4), axis=-1).astype(np.uint8)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64).reshape(len(codes), -1)
    if scales.dtype == np.uint8:
        scales = scales.view(ml_dtypes.float8_e4m3fn)
    exact = values * scales.astype(np.float64).repeat(values.shape[1] // scales.shape[1], axis=1)
    number = np.float64(np.float32(factor))
    return (exact / number if divides else exact * number).astype(np.float32)


def write_tensors(root: Path, tensors: Tensors, *, limit: int) -> None:
    specs = [TensorSpec(name, kind, array.shape) for name, (kind, array) in tensors.items()]
    shards = plan_shards(specs, limit_bytes=limit)
    for shard, parts in shards.items():
        with ShardWriter(root / shard, parts) as writer:
            for spec in parts:
                writer.write(spec.name, tensors[spec.name][1])
    write_index(root, shards)


def decoded(root: Path) -> dict[str, np.ndarray]:
    with open_tensors(root) as reader:
        forms = {
            name: (reader.entry(name).dtype, reader.entry(name).shape) for name in reader.names()
        }
        return {each.module: open_matrix(reader, each).values() for each in find_stored(forms)[0]}


def add(tensors: Tensors, layout: str, module: str, codes: np.ndarray, scales: np.ndarray) -> float:
    """Add one matrix in a layout; return its global."""
    factor = 0.0625 + len(tensors) / 512
    names = {np.dtype(np.uint8): "F8_E4M3", np.dtype("f2"): "F16", np.dtype("f4"): "F32"}
    kind = names[scales.dtype]
    if layout == "quasar":
        tensors[f"{module}.qweight"] = ("I32", codes.view("<i4"))
        tensors[f"{module}.weight_scales"] = (kind, scales)
        tensors[f"{module}.weight_scale_2"] = ("F32", np.array(factor, np.float32))
    elif layout == "modelopt":
        tensors[f"{module}.weight"] = ("U8", codes)
        tensors[f"{module}.weight_scale"] = (kind, scales)
        tensors[f"{module}.weight_scale_2"] = ("F32", np.array(factor, np.float32))
    else:
        tensors[f"{module}.weight_packed"] = ("U8", codes)
        tensors[f"{module}.weight_scale"] = (kind, scales)
        tensors[f"{module}.weight_global_scale"] = ("F32", np.array([factor], np.float32))
    return factor


@SETTINGS
@hypothesis.given(size=SIZES, layout=st.sampled_from(["modelopt", "ct", "quasar"]))
def test_safetensors_of_any_size_decode_to_the_oracles_values(
    size: tuple[int, int, int, int], layout: str
) -> None:
    rows, blocks, parts, seed = size
    generator = np.random.default_rng(seed)
    tensors: Tensors = {}
    expected: dict[str, np.ndarray] = {}
    for part in range(parts):
        columns = 16 * blocks
        codes = random_codes(generator, rows, columns)
        scales = generator.integers(0, 0x50, (rows, blocks), dtype=np.uint8)
        module = f"layer.part_{part}"
        factor = add(tensors, layout, module, codes, scales)
        expected[module] = oracle(codes, scales, factor, divides=layout == "ct")

    with tempfile.TemporaryDirectory() as place:
        write_tensors(Path(place), tensors, limit=int(generator.integers(64, 4096)))
        found = decoded(Path(place))

    assert found.keys() == expected.keys()
    for module, values in expected.items():
        np.testing.assert_array_equal(found[module].view(np.uint32), values.view(np.uint32))


@SETTINGS
@hypothesis.given(size=SIZES, kind=st.sampled_from(["f2", "f4", "u1"]), dense=st.booleans())
def test_container_of_any_size_gives_back_what_was_written(
    size: tuple[int, int, int, int], kind: str, dense: bool
) -> None:
    rows, blocks, parts, seed = size
    generator = np.random.default_rng(seed)
    group = 16 if kind == "u1" else 128
    types = {"f2": "F16", "f4": "F32", "u1": "F8_E4M3"}
    entries: list[ContainerEntry] = []
    expected: dict[str, np.ndarray] = {}
    for part in range(parts):
        shape = (rows, group * blocks)
        codes = random_codes(generator, *shape)
        scales = generator.integers(1, 0x58, (rows, blocks)).astype(kind)
        segments = {"qweight": ("U32", codes.view("<u4")), "scales": (types[kind], scales)}
        factor = 1.0
        if part % 2:
            factor = 0.125
            segments["global"] = ("F32", np.array([factor], np.float32))
        entries.append(ContainerEntry(f"layer.part_{part}", shape, segments, "e2m1", group))
        expected[f"layer.part_{part}"] = oracle(codes, scales, factor, divides=False)
    plain = generator.integers(0, 2**16, (parts, 3), dtype=np.uint16)
    if dense:
        entries.append(ContainerEntry("norm.weight", plain.shape, {"data": ("BF16", plain)}))

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.qsr"
        write_container(path, entries, {"name": "test"})
        container = read_container(path)
        check_payload(container)
        reader = ContainerReader(container)
        for tensor in container.tensors:
            if tensor.is_dense:
                np.testing.assert_array_equal(reader.array(tensor, "data"), plain)
            else:
                found = reader.matrix(tensor).values()
                np.testing.assert_array_equal(found, expected.pop(tensor.name))
        names = [each.name for each in container.tensors]

    assert names == [entry.name for entry in entries]
    assert expected == {}


@SETTINGS
@hypothesis.given(size=SIZES)
def test_stacks_of_any_size_are_the_same_either_way_round(size: tuple[int, int, int, int]) -> None:
    rows, blocks, experts, seed = size
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 256, (experts, rows, 8 * blocks), dtype=np.uint8)
    scales = generator.integers(0, 0x58, (experts, rows, blocks), dtype=np.uint8)
    factors = generator.uniform(0.01, 0.1, experts).astype(np.float32)
    shape = (experts, rows, 16 * blocks)
    expected = np.stack(
        [oracle(*one, divides=False) for one in zip(codes, scales, factors, strict=True)]
    )

    for turned in (False, True):
        with tempfile.TemporaryDirectory() as place:
            order = (0, 2, 1) if turned else (0, 1, 2)
            tensors: Tensors = {
                "experts.down_proj": ("U8", codes.transpose(order).copy()),
                "experts.down_proj_weight_scale": ("F8_E4M3", scales.transpose(order).copy()),
                "experts.down_proj_weight_scale_2": ("F32", factors),
            }
            write_tensors(Path(place), tensors, limit=2**30)
            with open_tensors(Path(place)) as reader:
                forms = {n: (reader.entry(n).dtype, reader.entry(n).shape) for n in reader.names()}
                [stored], _ = find_stored(forms)
                found = open_matrix(reader, stored, shape).values()
        np.testing.assert_array_equal(found, expected)


@SETTINGS
@hypothesis.given(rows=st.integers(1, 9), blocks=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_gguf_blocks_hold_the_canonical_codes(rows: int, blocks: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 16, (rows, blocks, 4, 2, 8), dtype=np.uint8)
    scales = generator.integers(0, 0x7F, (rows, blocks, 4), dtype=np.uint8)
    data = (codes[..., 0, :] | (codes[..., 1, :] << 4)).reshape(rows, blocks, 32)

    packed, found = unpack_blocks(np.concatenate([scales, data], axis=-1))

    np.testing.assert_array_equal(packing.unpack(packed), codes.reshape(rows, -1))
    np.testing.assert_array_equal(found, scales.reshape(rows, -1))
