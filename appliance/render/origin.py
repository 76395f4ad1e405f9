"""Where a rendered item comes from: a key, a decision of the plan, the gate, or a fixed policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.plan.adjustments import Adjustments
    from appliance.plan.launch_plan import LaunchPlan


class Origins:
    """Names origins for one plan."""

    def __init__(self, plan: LaunchPlan) -> None:
        """Index the plan's decisions by key; the last word on a key counts."""
        self._decisions = {decision.key: decision for decision in plan.decisions}

    def key(self, key: str) -> str:
        """Return the key, and the plan's reason where the plan resolved it."""
        decision = self._decisions.get(key)
        return f"plan {key}: {decision.reason}" if decision else f"config {key}"

    @staticmethod
    def policy(reason: str) -> str:
        """Return a fixed policy with its reason."""
        return f"policy: {reason}"

    @staticmethod
    def gate(adjustments: Adjustments) -> str:
        """Return the measurements of the gate."""
        return f"gate: {'; '.join(adjustments.reasons) or 'a measurement'}"
