"""Loading: every fault of a file in one run, each with file, line, expectation, value and fix."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.config.load import LoadedConfig, load_config
from appliance.config.schema import Config
from appliance.errors import ApplianceError, Fault
from appliance.units import GIB

FaultsOf = Callable[..., list[Fault]]
OnlyFault = Callable[..., Fault]
Load = Callable[..., LoadedConfig]


def test_load_minimal_file_has_every_default(load: Load) -> None:
    loaded = load("")

    assert loaded.config == Config.model_validate({"version": 1, "model": {"path": "/m"}})
    assert loaded.config.memory.shm_size == 16 * GIB
    assert loaded.warnings == ()


def test_load_digest_is_of_the_bytes(load: Load) -> None:
    loaded = load("# a comment\n")

    assert loaded.sha256 == hashlib.sha256(Path("appliance.yaml").read_bytes()).hexdigest()


def test_load_where_of_a_stated_key_is_its_line(load: Load) -> None:
    loaded = load("parallel:\n  mode: single\n")

    assert loaded.where("parallel.mode") == "appliance.yaml:4 parallel.mode"


def test_load_where_of_an_absent_key_is_its_section(load: Load) -> None:
    loaded = load("server:\n  port: 1\n")

    assert loaded.where("server.limits.max_request_size").startswith(
        "appliance.yaml:3 server.limits"
    )
    assert loaded.where("gate.mode") == "appliance.yaml:1 gate.mode"


def test_load_off_without_quotes_is_the_word_off(load: Load) -> None:
    loaded = load("gate: {p2p: {policy: off}}\n")

    assert loaded.config.gate.p2p.policy == "off"


def test_load_byte_order_mark_is_no_fault(load: Load) -> None:
    loaded = load(b"\xef\xbb\xbfversion: 1\nmodel: {path: /m}\n")

    assert loaded.config.model.path == "/m"


def test_load_environment_changes_nothing(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load("")
    for name in ("APPLIANCE_PORT", "APPLIANCE_SERVER_PORT", "SERVER__PORT", "VLLM_PORT", "PORT"):
        monkeypatch.setenv(name, "1")

    assert load("") == before


def test_load_reports_all_faults_of_a_file_in_order_of_lines(faults_of: FaultsOf) -> None:
    faults = faults_of(
        """\
version: 1
model: {path: Qwen/x}
parallel:
  mode: tensr
memory:
  max_num_seqs: true
  max_num_seqs: 5
  block: 1
server: {host: 0.0.0.0, port: 9400}
execution: {extra_args: {swap_space: 4}}
gate: {timeout: !!float 3}
""",
        base="",
    )

    assert [(fault.code, fault.where.split(":")[1].split()[0]) for fault in faults] == [
        ("CONFIG_VALUE", "2"),
        ("CONFIG_VALUE", "4"),
        ("CONFIG_VALUE", "6"),
        ("CONFIG_DUPLICATE_KEY", "7"),
        ("CONFIG_UNKNOWN_KEY", "8"),
        ("API_WITHOUT_KEYS", "9"),
        ("PORTS_EQUAL", "9"),
        ("FLAG_UNKNOWN", "10"),
        ("CONFIG_TAG", "11"),
        ("CONFIG_VALUE", "11"),
    ]


def test_load_unknown_key_names_the_set_and_the_nearest(only_fault: OnlyFault) -> None:
    fault = only_fault("parallel: {moed: single}\n")

    assert str(fault) == (
        "error[CONFIG_UNKNOWN_KEY] appliance.yaml:3 parallel.moed: must be one of mode, gpus, "
        "cpu_ranks, got `moed`; write `mode` if that is meant, else remove the line."
    )


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("port: 1\n", "write it as server.port"),
        ("tensor_parallel_size: 2\n", "remove the line; it is decided by parallel.mode"),
        ("dtype: bfloat16\n", "execution.device: float16 on a GPU"),
        ("swap_space: 4\n", "does not swap"),
        ("memory: {ipc: host}\n", "memory.shm_size"),
        ("parallel: {tensor: 2}\n", "remove the line and use parallel.mode: tensor"),
        ("parallel: {pipeline: 2}\n", "remove the line and use parallel.mode: pipeline"),
        ("entirely_new: 1\n", "remove the line"),
    ],
)
def test_load_unknown_key_says_where_its_wish_belongs(
    only_fault: OnlyFault, text: str, advice: str
) -> None:
    fault = only_fault(text)

    assert fault.code == "CONFIG_UNKNOWN_KEY"
    assert advice in fault.fix


@pytest.mark.parametrize("text", ["model: {path: /m}\n", "version: 1\n", "version: 1\nmodel: {}\n"])
def test_load_missing_key_is_named(only_fault: OnlyFault, text: str) -> None:
    fault = only_fault(text, base="")

    assert fault.code == "CONFIG_MISSING_KEY"
    assert fault.where.split()[-1] in ("version", "model", "model.path")
    assert fault.value == "nothing"


@pytest.mark.parametrize(
    ("text", "expected", "value"),
    [
        ("memory: {shm_size: 16}", "a size with a unit", "16"),
        ("memory: {shm_size: 16GB}", "a size with a unit", '"16GB"'),
        ("memory: {shm_size: 1MiB}", "from 64MiB to 1024GiB", '"1MiB"'),
        ("server: {drain_timeout: 60}", "a duration with a unit", "60"),
        ("server: {drain_timeout: 60 seconds}", "a duration with a unit", '"60 seconds"'),
        ("startup: {timeout: 1s}", "from 10s to 1d", '"1s"'),
        ("memory: {max_num_seqs: true}", "an integer from 1 to 1024", "true"),
        ("memory: {max_num_seqs: 4.0}", "an integer from 1 to 1024", "4.0"),
        ("memory: {max_num_seqs: 0}", "an integer from 1 to 1024", "0"),
        ('memory: {max_num_seqs: "4"}', "an integer from 1 to 1024", '"4"'),
        ("memory: {gpu_memory_utilization: 0.96}", "from 0.1 to 0.95", "0.96"),
        ("memory: {gpu_memory_utilization: true}", "from 0.1 to 0.95", "true"),
        ("memory: {gpu_memory_utilization: .nan}", "from 0.1 to 0.95", "nan"),
        ("gate: {pcie: {rate_warn: .inf}}", "a number above 0", "inf"),
        ("memory: {kv_cache_dtype: fp8}", "`auto`", '"fp8"'),
        ("execution: {enforce_eager: yes}", "`auto`, `true` or `false`", '"yes"'),
        ("execution: {block_size: 16.0}", "`16`, `32`, `64` or `128`", "16.0"),
        ("execution: {extra_args: {seed: null}}", "`true`, `false`, an integer", "null"),
        ("execution: {extra_args: {seed: [1]}}", "`true`, `false`, an integer", "[1]"),
        ("parallel: {gpus: [0, GPU-1234]}", "a list (each an integer", '[0, "GPU-1234"]'),
        ("parallel: {gpus: [true]}", "a list (each an integer", "[true]"),
        ("parallel: {gpus: [64]}", "from 0 to 63", "[64]"),
        ("parallel: {gpus: 0}", "`all`", "0"),
        ("server: {host: example.org}", "an IP address or `localhost`", '"example.org"'),
        ("server: {host: 127.0.0.1:8000}", "an IP address", '"127.0.0.1:8000"'),
        ("server: {port: 65536}", "from 1 to 65535", "65536"),
        ("server: {api_keys_file: keys}", "an absolute path", '"keys"'),
        ("server: {limits: null}", "a mapping with the keys max_request_size", "null"),
        ("gate: 5", "a mapping with the keys mode", "5"),
        ("logging: [json]", "a mapping with the keys format", '["json"]'),
    ],
)
def test_load_wrong_value_names_the_expectation_and_the_value(
    only_fault: OnlyFault, text: str, expected: str, value: str
) -> None:
    fault = only_fault(f"{text}\n")

    assert fault.code == "CONFIG_VALUE"
    assert expected in fault.what
    assert fault.value == value
    assert fault.where.startswith("appliance.yaml:3 ")


@pytest.mark.parametrize(
    ("text", "value", "fix"),
    [
        ("memory:\n", "null", "write its keys below it, or remove the line"),
        ("memory: 3\n", "3", "write its keys below it, or remove the line"),
        (
            "parallel: {gpus: '0,1'}\n",
            '"0,1"',
            "write [0, 1] if that is meant, or remove the line for the default `all`",
        ),
        (
            "parallel:\n  gpus: 0, 1\n",
            '"0, 1"',
            "write [0, 1] if that is meant, or remove the line for the default `all`",
        ),
        (
            "parallel: {gpus: 0}\n",
            "0",
            "write [0] if that is meant, or remove the line for the default `all`",
        ),
        ("gate: {overrides: 3}\n", "3", "change it, or remove the line for the default `[]`"),
    ],
)
def test_load_wrong_value_says_what_to_write(
    only_fault: OnlyFault, text: str, value: str, fix: str
) -> None:
    fault = only_fault(text)

    assert (fault.code, fault.value, fault.fix) == ("CONFIG_VALUE", value, fix)


@pytest.mark.parametrize("version", ["2", "true", "1.0", '"1"', "null"])
def test_load_other_version_is_refused(only_fault: OnlyFault, version: str) -> None:
    fault = only_fault(f"version: {version}\nmodel: {{path: /m}}\n", base="")

    assert fault.what == "must be `1`"


@pytest.mark.parametrize("path", ["models/x", "Qwen/Qwen3-0.6B", "~/x", '"/a\\nb"', '""'])
def test_load_model_path_that_is_not_absolute_is_refused(only_fault: OnlyFault, path: str) -> None:
    fault = only_fault(f"version: 1\nmodel: {{path: {path}}}\n", base="")

    assert fault.where == "appliance.yaml:2 model.path"


def test_load_bare_number_as_date_is_refused(faults_of: FaultsOf) -> None:
    override = "{check: a, gpu: g, reason: long enough, by: b, until: 20261201, bound: 1}"

    faults = faults_of(f"gate: {{overrides: [{override}]}}\n")

    assert [fault.where for fault in faults] == ["appliance.yaml:3 gate.overrides[0].until"]
    assert faults[0].what == "must be a date such as 2026-12-31"


def test_load_two_faults_of_one_override_are_both_named(faults_of: FaultsOf) -> None:
    faults = faults_of("gate:\n  overrides:\n    - {check: a, gpu: g, by: b, bound: 1}\n")

    assert [fault.where.split()[1] for fault in faults] == [
        "gate.overrides[0].reason",
        "gate.overrides[0].until",
    ]


def test_load_rule_is_silent_where_its_key_is_faulty(only_fault: OnlyFault) -> None:
    fault = only_fault("server: {host: 0.0.0.0, api_keys_file: relative}\n")

    assert fault.where == "appliance.yaml:3 server.api_keys_file"


@pytest.mark.parametrize("digits", ["9" * 400, "9" * 31, "0." + "1" * 400])
def test_load_size_or_duration_of_hundreds_of_digits_is_refused(
    faults_of: FaultsOf, digits: str
) -> None:
    faults = faults_of(
        f"memory: {{shm_size: {digits}GiB}}\nruntime: {{stall: {digits}s}}\n"
        f"server: {{drain_timeout: {digits}ms}}\n"
    )

    assert [fault.code for fault in faults] == ["CONFIG_VALUE"] * 3
    assert "a size with a unit" in faults[0].what


@pytest.mark.parametrize(
    "text",
    [
        "parallel: {gpus: [" + ", ".join(map(str, range(9000))) + "]}\n",
        "".join(f"key{number}: {number}\n" for number in range(4900)),
        "".join(f"  - {{until: {number}}}\n" for number in range(1900)).join(
            ["gate:\n  overrides:\n", ""]
        ),
    ],
    ids=["list", "keys", "overrides"],
)
def test_load_thousands_of_faults_take_seconds_not_minutes(faults_of: FaultsOf, text: str) -> None:
    begun = time.process_time()

    assert faults_of(text)

    assert (
        time.process_time() - begun < 15
    )  # 0.6 s alone; 60 s and more when each walked the schema


def test_load_unknown_key_with_a_dot_is_looked_up_where_it_stands(only_fault: OnlyFault) -> None:
    fault = only_fault("model.path: /m\n")

    assert fault.code == "CONFIG_UNKNOWN_KEY"
    assert "must be one of version, model, parallel" in fault.what
    assert fault.value == "`model.path`"


def test_load_key_with_control_characters_stays_one_printable_line(only_fault: OnlyFault) -> None:
    line = str(only_fault('"\\e[31mred\\nerror[FAKE] x": 1\n'))

    assert line.isprintable()
    assert "\\x1b[31mred\\nerror[FAKE] x" in line


def test_load_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ApplianceError, match=r"error\[CONFIG_FILE\] .*No such file or directory"):
        load_config(tmp_path / "absent.yaml")


def test_load_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ApplianceError, match="got a directory"):
        load_config(tmp_path)


def test_load_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(ApplianceError, match="got no regular file"):
        load_config(tmp_path / "pipe")


def test_load_device_is_refused() -> None:
    with pytest.raises(ApplianceError, match="got no regular file"):
        load_config(Path("/dev/zero"))


def test_load_null_byte_in_the_name_is_refused() -> None:
    with pytest.raises(ApplianceError, match="CONFIG_FILE"):
        load_config(Path("a\0b"))


def test_load_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)

    with pytest.raises(ApplianceError, match="Too many levels of symbolic links"):
        load_config(loop)


def test_load_five_mebibytes_are_refused(only_fault: OnlyFault) -> None:
    fault = only_fault("# " + "x" * 5 * 1024**2)

    assert fault.code == "CONFIG_SIZE"


def test_load_file_that_is_not_utf8_is_refused_at_its_line(only_fault: OnlyFault) -> None:
    fault = only_fault(b"version: 1\nmodel: {path: /m\xe9}\n")

    assert (fault.code, fault.where, fault.value) == (
        "CONFIG_ENCODING",
        "appliance.yaml:2",
        "byte 0xe9",
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gate: {mode: off}\n", "the hardware is not checked at all"),
        ("gate: {mode: warn}\n", "reports but starts anyway"),
        ("gate: {on_unknown: allow}\n", "counts as healthy"),
        ("gate: {ecc: {require_enabled: false}}\n", "without ECC"),
        ("execution: {weights: dequantized}\n", "debug route"),
        ("startup: {canary: false}\n", "before an answer was seen"),
        ("server: {api_keys_file: /k eys}\n", "spaces or non-ASCII"),
    ],
)
def test_load_bypass_is_a_warning_with_its_line(load: Load, text: str, sentence: str) -> None:
    loaded = load(text)

    assert len(loaded.warnings) == 1
    assert loaded.warnings[0].startswith("appliance.yaml:3 ")
    assert sentence in loaded.warnings[0]


def test_load_path_with_letters_beyond_ascii_is_a_warning(load: Load) -> None:
    loaded = load("version: 1\nmodel: {path: /modèle}\n", base="")

    assert "appliance.yaml:2 model.path" in loaded.warnings[0]
