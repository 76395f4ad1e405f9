"""The appliance's own metrics, made from one snapshot when they are asked for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from appliance.serve import health
from appliance.serve.board import Board, Slot
from appliance.serve.machine import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

    from appliance.serve.health import Snapshot

_REFUSALS = {
    "unauthorized": Slot.UNAUTHORIZED,
    "too_large": Slot.TOO_LARGE,
    "too_many": Slot.TOO_MANY,
    "turned_away": Slot.TURNED_AWAY,
    "too_slow": Slot.TOO_SLOW,
    "closed_route": Slot.CLOSED_ROUTE,
}


def package_version() -> str:
    """Return the installed version of the appliance."""
    try:
        return version("v100-nvfp4-appliance")
    except PackageNotFoundError:
        return "unknown"


class _Values(Collector):
    def __init__(self, snapshot: Snapshot, board: Board, beat_age_s: float, now: float) -> None:
        self._snapshot = snapshot
        self._board = board
        self._beat_age_s = beat_age_s
        self._now = now

    def collect(self) -> Iterator[Metric]:
        snapshot, board = self._snapshot, self._board
        plan = snapshot.settings.plan
        info = {"version": package_version(), "config_sha256": plan.config_sha256}
        yield InfoMetricFamily("appliance", "What runs here.", value=info)
        phase = GaugeMetricFamily("appliance_phase", "1 for the current phase.", labels=["phase"])
        for each in Phase:
            phase.add_metric([each.value], float(each is snapshot.state.phase))
        yield phase
        ready = health.ready(snapshot, beat_age_s=self._beat_age_s)
        for name, text, value in (
            ("ready", "1 while requests may come.", float(ready.ok)),
            ("gpus_ready", "1 while the GPUs let requests come.", float(snapshot.gpus.ready)),
            ("engine_alive", "1 while the engine's process runs.", float(snapshot.engine_alive)),
            (
                "gpu_fault",
                "1 once a GPU fault is latched.",
                float(snapshot.state.latched is not None),
            ),
            (
                "config_drift",
                "1 if the configuration file was changed.",
                float(snapshot.config_drift),
            ),
            ("start_attempts", "Starts of the engine in this run.", float(snapshot.state.attempt)),
            ("safer_settings", "Rungs of the ladder in force.", float(len(snapshot.rungs))),
            ("recent_ends", "Ends that the restart budget counts.", float(snapshot.recent_ends)),
            ("no_progress_seconds", "Time waited without progress.", snapshot.watch.waited_s),
            ("phase_seconds", "Time spent in the phase.", self._now - snapshot.phase_since),
            ("requests_in_flight", "Requests in flight.", float(board.read(Slot.IN_FLIGHT))),
        ):
            yield GaugeMetricFamily(f"appliance_{name}", text, value=value)
        accepted = float(board.read(Slot.ACCEPTED))
        yield CounterMetricFamily("appliance_requests_accepted", "Requests let in.", value=accepted)
        refused = CounterMetricFamily(
            "appliance_requests_refused", "Requests refused.", labels=["why"]
        )
        for why, slot in _REFUSALS.items():
            refused.add_metric([why], float(board.read(slot)))
        yield refused
        if snapshot.watch.scraped_at is not None:
            age = self._now - snapshot.watch.scraped_at
            text = "Age of the engine's metrics below."
            yield GaugeMetricFamily("appliance_engine_metrics_age_seconds", text, value=age)


class Exposition:
    """Renders `/metrics`: ours, the GPUs' last sample, then the engine's as scraped last."""

    def __init__(
        self, snapshot: Callable[[], Snapshot], board: Board, beat_age_s: Callable[[], float]
    ) -> None:
        """Keep where the values come from."""
        self._snapshot = snapshot
        self._board = board
        self._beat_age_s = beat_age_s

    def text(self, now: float) -> bytes:
        """Return the metrics in Prometheus' text form; never asks the engine."""
        snapshot = self._snapshot()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Values(snapshot, self._board, self._beat_age_s(), now))
        others = snapshot.gpus.metrics + snapshot.watch.engine_metrics
        return generate_latest(registry) + others.encode()
