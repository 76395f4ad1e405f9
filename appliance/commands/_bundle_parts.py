"""Collects the parts of a support bundle by asking the verbs' own functions."""

from __future__ import annotations

import contextlib
import io
import json
import os
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from appliance.bundle.archive import Entry
from appliance.bundle.attempt import Got, Missed, attempt, attempt_in_time
from appliance.bundle.files import MOST_BYTES, Text, cut, read_tail
from appliance.bundle.secrets import Scrubber, dump
from appliance.commands import doctor
from appliance.commands._bundle_machine import Machine, look, verdict, versions
from appliance.commands._planning import planned
from appliance.config.document import parse_document
from appliance.config.load import load_config
from appliance.errors import ApplianceError
from appliance.render.argv import engine_command, vllm_argv
from appliance.render.environ import child_environment, environment
from appliance.serve.ask import ask_admin
from appliance.serve.run import ADMIN_FILE
from healthchecks.probes import DEFAULT_STATE_DIR
from healthchecks.simulate import record_text
from healthchecks.state_file import ACTION_NAME, AUDIT_NAME, STATE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config.load import LoadedConfig
    from appliance.plan.launch_plan import LaunchPlan

LAST_RUN = "last_run.json"
STATE_FILES = ("serve.json", LAST_RUN, STATE_NAME, ACTION_NAME, AUDIT_NAME)
SET_ASIDE = ("*.bad", f"{STATE_NAME}.corrupt-*")
_MOST_SET_ASIDE = 3

_Value = Got[Any] | Missed
_WITHOUT_STATUS = Missed("no appliance answers, see status.json")
_WITHOUT_LOG = Missed(
    f"no run has left its last lines in {LAST_RUN}; name the service's log by --log FILE"
)


class Parts:
    """What was collected so far; secrets leave it at the end, when all that are known are known."""

    def __init__(self, arguments: Namespace) -> None:
        """Collect nothing yet."""
        self._arguments = arguments
        self._scrubber = Scrubber(os.environ)
        self._found: dict[str, _Value] = {}
        self._document = attempt(self._read_document)
        if isinstance(self._document, Got):
            self._scrubber.learn_values(self._document.value)
        self._loaded = attempt(lambda: load_config(arguments.config))
        self._state_dir = self._find_state_dir()

    def collect(self) -> list[Entry]:
        """Return every part in the order of the bundle."""
        plan = self._plan()
        loaded = self._config()
        section = None if loaded is None else loaded.config.gate
        launch = plan.value if isinstance(plan, Got) else None
        seen = attempt_in_time(lambda: look(launch, section, self._state_dir))
        machine = seen.value if isinstance(seen, Got) else None
        self._add("versions.json", lambda: versions(machine))
        self._add("config.json", self._config_values)
        self._found["plan.json"] = _then(plan, lambda found: json.loads(found.to_json()))
        without_plan = Missed("there is no plan, see plan.json")
        self._found["render.json"] = (
            without_plan if isinstance(plan, Missed) else _then(plan, _rendered)
        )
        self._found["gate.json"] = _then(
            seen, lambda found: json.loads(verdict(found, section, self._state_dir).to_json())
        )
        self._found["machine.json"] = _then(seen, _recorded)
        self._running()
        self._state()
        self._log()
        return [self._entry(path, found) for path, found in self._found.items()]

    def clean(self, value: object) -> object:
        """Return plain values without secrets."""
        return self._scrubber.plain(value)

    def _add(self, path: str, make: Callable[[], object]) -> None:
        self._found[path] = attempt(make)

    def _config(self) -> LoadedConfig | None:
        return self._loaded.value if isinstance(self._loaded, Got) else None

    def _read_document(self) -> dict[str, Any]:
        path: Path = self._arguments.config
        text = read_tail(path, follow=True).text.removeprefix("\ufeff")
        return cast("dict[str, Any]", parse_document(text, str(path)).data)

    def _find_state_dir(self) -> Path:
        """Return where the state is: told, as configured, or where a faulty file says."""
        told: Path | None = self._arguments.state_dir
        loaded = self._config()
        if told is not None or loaded is not None:
            return told or Path(loaded.config.gate.state_dir if loaded else DEFAULT_STATE_DIR)
        data = self._document.value if isinstance(self._document, Got) else {}
        gate = data.get("gate")
        named = cast("dict[str, Any]", gate).get("state_dir") if isinstance(gate, dict) else None
        return Path(named if isinstance(named, str) and named else DEFAULT_STATE_DIR)

    def _config_values(self) -> dict[str, object]:
        """Return the values in force, or those that were read and the faults; never comments."""
        loaded = self._config()
        if loaded is not None:
            return {
                "path": str(loaded.path),
                "sha256": loaded.sha256,
                "stated_at_line": dict(loaded.lines),
                "warnings": list(loaded.warnings),
                "values": loaded.config.model_dump(mode="json"),
            }
        error = self._loaded.error if isinstance(self._loaded, Missed) else None
        if not isinstance(error, ApplianceError):
            raise error or LookupError("no configuration")
        return {
            "path": str(self._arguments.config),
            "faults": [asdict(fault) for fault in error.faults],
            "read": self._document.value if isinstance(self._document, Got) else None,
        }

    def _plan(self) -> Got[LaunchPlan] | Missed:
        if isinstance(self._loaded, Missed):
            return Missed("the configuration is invalid, see config.json")
        return attempt_in_time(lambda: planned(self._arguments).plan)

    def _running(self) -> None:
        """Ask a running appliance; its own run file knows the port better than an edited file."""
        run_file = self._state_dir / "run" / ADMIN_FILE
        told = attempt(run_file.is_file)
        known = self._config() is not None and told != Got(value=True)
        place = Namespace(
            url=None,
            port=None,
            config=self._arguments.config if known else None,
            state_dir=str(self._state_dir),
        )
        ask = partial(ask_admin, place, "GET")
        status = attempt_in_time(lambda: json.loads(ask("/status")))
        self._found["status.json"] = status
        for path, route in (("running_plan.json", "/plan"), ("metrics.txt", "/metrics")):
            self._found[path] = (
                attempt_in_time(partial(ask, route)) if isinstance(status, Got) else _WITHOUT_STATUS
            )

    def _state(self) -> None:
        for name in STATE_FILES:
            self._add(f"state/{name}", partial(read_tail, self._state_dir / name))
        aside = attempt(
            lambda: sorted(path.name for each in SET_ASIDE for path in self._state_dir.glob(each))
        )
        for name in aside.value[-_MOST_SET_ASIDE:] if isinstance(aside, Got) else ():
            self._add(f"state/{name}", partial(read_tail, self._state_dir / name))

    def _log(self) -> None:
        """Take the log that was named, or the engine's last lines that the last run left."""
        path: Path | None = self._arguments.log
        if path is not None:
            log: _Value = attempt(lambda: read_tail(path, follow=True))
            self._found["log.txt"] = log
            self._found["doctor.json"] = _then(log, _diagnosed_log)
            return
        last = self._found[f"state/{LAST_RUN}"]
        log = _WITHOUT_LOG if isinstance(last, Missed) else _then(last, _last_lines)
        self._found["log.txt"] = log
        place = f"--state-dir={self._state_dir}"
        # Without a last run doctor may still know why; from a pipe in its place it would read on.
        absent = isinstance(last, Missed) and isinstance(last.error, FileNotFoundError)
        self._found["doctor.json"] = (
            attempt(partial(_diagnosed, place))
            if absent
            else _then(last, lambda _: _diagnosed(place))
        )

    def _entry(self, path: str, found: _Value) -> Entry:
        """Return a part without secrets and not too large."""
        if isinstance(found, Missed):
            return Entry(path, reason=self._scrubber.text(found.reason))
        cleaned = attempt(lambda: self._cleaned(path, found.value))
        if isinstance(cleaned, Missed):
            return Entry(path, reason=self._scrubber.text(cleaned.reason))
        text = cleaned.value
        return Entry(path, text.text.encode(), left_out=text.left_out)

    def _cleaned(self, path: str, value: object) -> Text:
        text = value if isinstance(value, Text) else None
        if text is None and isinstance(value, str):
            text = Text(value)
        if text is None:
            content = dump(self._scrubber.plain(value)).encode()
            if len(content) > MOST_BYTES:
                raise ValueError(f"{len(content)} bytes, more than {MOST_BYTES}")
            return Text(content.decode())
        scrub = self._scrubber.json_or_text if path.endswith(".json") else self._scrubber.text
        clean = scrub(text.text).encode(errors="replace")
        shorter = cut(clean)
        return Text(shorter.text, text.left_out + shorter.left_out)


def _then(found: _Value, make: Callable[[Any], object]) -> _Value:
    """Make a part of another; what that one lacks, this one lacks too."""
    if isinstance(found, Missed):
        return found
    return attempt(partial(make, found.value))


def _rendered(plan: LaunchPlan) -> dict[str, object]:
    items, variables = vllm_argv(plan), environment(plan)
    _, dropped = child_environment(variables, os.environ)
    return {
        "command": list(engine_command(items)),
        "argv": [asdict(item) for item in items],
        "environment": [asdict(variable) for variable in variables],
        "dropped": list(dropped),
    }


def _recorded(seen: Machine) -> object:
    return json.loads(record_text(seen.facts, seen.plan))


def _last_lines(last_run: Text) -> str:
    return "".join(f"{line}\n" for line in json.loads(last_run.text)["lines"])


def _diagnosed_log(log: Text) -> object:
    """Give doctor the lines that the bundle holds, however long the log is."""
    descriptor = os.memfd_create("log")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(log.text.encode())
        return _diagnosed(f"--log=/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _diagnosed(*words: str) -> object:
    parser = ArgumentParser()
    doctor.configure(parser)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        doctor.run(parser.parse_args([*words, "--json"]))
    return json.loads(said.getvalue())
