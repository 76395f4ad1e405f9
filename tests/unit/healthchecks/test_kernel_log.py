"""Kernel log lines of several drivers become events."""

from __future__ import annotations

import pytest

from healthchecks.kernel_log import AerLine, XidLine, aer_errors, short_bus, this_boot, xids

LINES = [
    (
        "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.",
        "3b:00",
        79,
    ),
    (
        "kernel: [  12.5] NVRM: Xid (PCI:00000000:3B:00.0): 13, Graphics SM Warp Exception",
        "3b:00",
        13,
    ),
    ("NVRM: Xid (0000:5e:00): 31, Ch 00000010", "5e:00", 31),
    ("6,1021,5000,-;NVRM: Xid (PCI:0001:af:00): 154, GPU recovery action changed", "1:af:00", 154),
    (
        "Nov 29 12:00:00 box kernel: [T1234] NVRM: Xid (PCI:0000:86:00): 48, pid=77, An",
        "86:00",
        48,
    ),
]


@pytest.mark.parametrize(("line", "bus", "xid"), LINES, ids=[str(case[2]) for case in LINES])
def test_xid_line_is_read_in_every_form(line, bus, xid):
    assert xids([line]) == (XidLine(bus, xid, 1),)


def test_xids_are_counted_by_gpu_and_number():
    line = LINES[0][0]

    assert xids([line, line, "NVRM: loading driver", line]) == (XidLine("3b:00", 79, 3),)


def test_aer_line_tells_corrected_from_fatal():
    found = aer_errors(
        [
            (
                "pcieport 0000:3a:00.0: PCIe Bus Error: severity=Uncorrected (Fatal),"
                " type=Transaction Layer, (Receiver ID)"
            ),
            (
                "nvidia 0000:3b:00.0: AER: PCIe Bus Error: severity=Corrected,"
                " type=Data Link Layer, (Transmitter ID)"
            ),
        ]
    )

    assert found == (
        AerLine("3a:00", "Uncorrected (Fatal)", "Transaction Layer"),
        AerLine("3b:00", "Corrected", "Data Link Layer"),
    )
    assert [line.corrected for line in found] == [False, True]


def test_only_lines_since_the_last_boot_count():
    lines = [LINES[0][0], "kernel: Linux version 6.1.0-18-amd64", LINES[1][0]]

    assert [line.xid for line in xids(this_boot(lines))] == [13]


@pytest.mark.parametrize(
    ("bus_id", "short"),
    [("00000000:3B:00.0", "3b:00"), ("0000:3b:00.0", "3b:00"), ("0001:3b:00", "1:3b:00")],
)
def test_bus_id_has_one_short_form(bus_id, short):
    assert short_bus(bus_id) == short
