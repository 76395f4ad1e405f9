"""Every recorded machine gets the verdict that was given to it by people."""

from __future__ import annotations

import json

import pytest

from appliance.cli import main

PLANS = {
    "single": ("single", "auto"),
    "pp2": ("pp2", "auto"),
    "tp2_require_p2p": ("tp2", "require"),
    "tp2_auto_fallback": ("tp2", "auto"),
}
CODES = {"pass": 0, "warn": 0, "fail": 20, "unknown": 21}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("strict", [False, True], ids=["expert", "strict"])
def test_gate_on_recorded_machine_gives_its_verdict(sample_path, plan, strict, capsys):
    record = json.loads(sample_path.read_text())
    kind, p2p = PLANS[plan]
    flags = ["--strict-evidence"] if strict else []

    code = main(
        ["gate", "--simulate", str(sample_path), "--as", kind, "--p2p", p2p, "--json", *flags]
    )

    report = json.loads(capsys.readouterr().out)
    wanted = record["strict"][plan] if strict else record["expert"][plan]["status"]
    assert report["verdict"] == wanted, [
        c for c in report["checks"] if c["status"] not in ("pass", "skipped")
    ]
    lost = record["host"]["driver_loaded"] is False
    assert code == report["exit_code"] == (11 if lost else CODES[wanted])
