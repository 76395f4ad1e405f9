"""The command frame: verbs, faults as lines and JSON, the last boundary."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys

import pytest

from appliance import cli
from appliance.errors import ApplianceError, ExitCode, Fault

FAULT = Fault("SOME_CODE", "here", "a thing", "another", "change it")


def test_fault_line_has_code_place_value_and_fix() -> None:
    assert str(FAULT) == "error[SOME_CODE] here: a thing, got another; change it."


def test_fault_line_shows_what_cannot_be_printed_and_cuts_what_nobody_reads() -> None:
    line = str(Fault("X", "a\nb", "\x1b[31mred", "\ud800\udcff", "y" * 5000))

    assert line.isprintable()
    assert line == f"error[X] a\\nb: \\x1b[31mred, got \\ud800\\udcff; {'y' * 1000}...."


def test_every_verb_has_a_module_with_help_configure_and_run() -> None:
    for verb in cli.VERBS:
        module = importlib.import_module(f"appliance.commands.{verb}")
        module.configure(argparse.ArgumentParser())

        assert callable(module.run), verb
        assert module.HELP, verb


def test_unknown_verb_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["frobnicate"])

    assert stopped.value.code == ExitCode.USAGE
    assert "frobnicate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["quantize", "--json"], "SRC, DST"),
        (["model", "inspect", "--json"], "PATH"),
        (["quantize", "a", "b", "--mode", "x", "--json"], "invalid choice: 'x'"),
        (["frobnicate", "--json"], "frobnicate"),
    ],
)
def test_usage_error_is_json_for_machines_too(
    words: list[str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)

    written = capsys.readouterr()
    found = json.loads(written.out)
    assert stopped.value.code == found["exit_code"] == ExitCode.USAGE
    assert found["faults"][0]["code"] == "USAGE"
    assert value in found["faults"][0]["value"]
    assert value in written.err
    assert "Traceback" not in written.err


def test_usage_error_without_json_writes_nothing_to_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["quantize"])

    assert capsys.readouterr().out == ""


def test_fault_becomes_lines_json_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = importlib.import_module("appliance.commands.schema")

    def refuse(_: argparse.Namespace) -> int:
        raise ApplianceError(ExitCode.CONFIG, FAULT, FAULT)

    monkeypatch.setattr(schema, "run", refuse)
    monkeypatch.setattr(
        schema, "configure", lambda parser: parser.add_argument("--json", action="store_true")
    )

    code = cli.main(["schema", "--json"])

    written = capsys.readouterr()
    assert code == ExitCode.CONFIG
    assert written.err.splitlines() == [str(FAULT)] * 2
    assert json.loads(written.out)["faults"][0]["code"] == "SOME_CODE"


def test_unforeseen_exception_is_a_bug_with_traceback_and_code_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = importlib.import_module("appliance.commands.schema")

    def break_down(_: argparse.Namespace) -> int:
        raise ZeroDivisionError("here")

    monkeypatch.setattr(schema, "run", break_down)

    code = cli.main(["schema"])

    error = capsys.readouterr().err
    assert code == ExitCode.BUG
    assert "Traceback" in error
    assert "error[BUG] appliance schema: " in error


def shell(text: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash in which `$A` is the command; the environment has no PYTHON variables."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    clean |= {"A": f"{sys.executable} -m appliance", **environment}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", text], capture_output=True, check=False, env=clean
    )


@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams_leave_work_and_exit_code_as_they_are(streams: str) -> None:
    done = shell(f"$A schema {streams} && ! $A plan --config /nowhere {streams}")

    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stdout + done.stderr


def test_full_disk_behind_stdout_is_told_and_is_no_bug() -> None:
    done = shell("$A schema >/dev/full")

    assert done.returncode == ExitCode.CONTAINER
    assert done.stderr.startswith(b"error[DISK_FULL] stdout: ")
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("streams", [">/dev/full", "2>/dev/full", "| true", "2>&1 | true"])
def test_fault_that_nobody_can_read_keeps_its_exit_code(streams: str) -> None:
    done = shell(f"$A validate --json --config /nowhere {streams}")

    assert done.returncode == ExitCode.CONFIG
    assert b"Exception ignored" not in done.stderr


def test_verb_that_a_gone_reader_cut_short_does_not_end_as_done() -> None:
    done = shell("$A schema | true")

    assert done.returncode == 141
    assert done.stderr == b""


def test_name_that_stdout_cannot_spell_is_escaped() -> None:
    done = shell("$A validate --schema-only --json --config /n\u00f6", PYTHONIOENCODING="ascii")

    assert done.returncode == ExitCode.CONFIG
    assert done.stderr.startswith(b"error[CONFIG_FILE] /n")
    assert done.stderr.isascii()


def test_bug_is_json_for_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    validate = importlib.import_module("appliance.commands.validate")

    def break_down(_: argparse.Namespace) -> int:
        raise ZeroDivisionError("here")

    monkeypatch.setattr(validate, "run", break_down)

    code = cli.main(["validate", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert (code, found["exit_code"]) == (ExitCode.BUG, ExitCode.BUG)
    assert found["faults"][0]["code"] == "BUG"
