"""What is wrong on every machine of V100s is found on a machine without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from planning import Configure, Tiny

from appliance.errors import ApplianceError
from appliance.plan.planner import check_without_cards

LONG = 2**22


@dataclass(frozen=True)
class Case:
    """A configuration of a small model, and the first fault of it."""

    code: int
    name: str
    value: str | None
    sections: dict[str, dict[str, object]] = field(default_factory=dict[str, dict[str, object]])
    model: dict[str, object] = field(default_factory=dict[str, object])


CASES = {
    "format": Case(30, "E_FORMAT", "nvfp4", {"model": {"format": "fp8"}}),
    "length": Case(10, "CONTEXT_TOO_LONG", "100000", {"model": {"max_model_len": 100_000}}),
    "heads": Case(
        10, "TP_INVALID", "9", {"parallel": {"mode": "tensor"}}, {"num_attention_heads": 9}
    ),
    "layers": Case(10, "PP_INVALID", "3", {"parallel": {"mode": "pipeline", "gpus": [0, 1, 2, 3]}}),
    "kernel": Case(30, "NO_KERNEL", "d=16 gs=2 kv=float16", {}, {"head_dim": 16}),
    "fit": Case(
        32,
        "PLAN_DOES_NOT_FIT",
        None,
        {"model": {"max_model_len": LONG}, "parallel": {"mode": "single"}},
        {"max_position_embeddings": LONG, "num_hidden_layers": 24},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_fault_of_every_machine_is_found_without_cards(
    configure: Configure, tiny: Tiny, case: Case
) -> None:
    loaded, summary = configure(**case.sections), tiny(**case.model)

    with pytest.raises(ApplianceError) as caught:
        check_without_cards(loaded, summary)

    first = caught.value.faults[0]
    assert (int(caught.value.exit_code), first.code) == (case.code, case.name)
    assert case.value in (None, first.value)


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"mode": "single"},
        {"mode": "tensor"},
        {"mode": "pipeline", "gpus": [40, 41]},
        {"mode": "tensor", "gpus": ["GPU-8c1f0000", "GPU-8c1f0001"]},
    ],
)
def test_what_some_machine_serves_is_right(
    configure: Configure, tiny: Tiny, parallel: dict[str, object]
) -> None:
    check_without_cards(configure(parallel=parallel), tiny())
