"""The thread that watches a ready engine; it blocks on the engine so that nobody else has to."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.serve.client import EngineClient, EngineSilentError, EngineUnreachableError
from appliance.serve.progress import Health, Progress, WatchStatus, parse_metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.serve.client import Answer

_OK = 200


class Watch:
    """Reads the engine's counters, asks an idle engine for one token, and keeps the last word."""

    def __init__(
        self,
        client: EngineClient,
        served_name: str,
        *,
        stall_s: float,
        in_flight: Callable[[], int],
        on_verdict: Callable[[WatchStatus], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep what to watch; `on_verdict` is told once, when the engine has stalled or is gone."""
        self.status = WatchStatus()
        self._client = client
        self._served_name = served_name
        self._stall_s = stall_s
        self._in_flight = in_flight
        self._on_verdict = on_verdict
        self._clock = clock
        self._interval_s = min(5.0, max(0.05, stall_s / 20))
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._progress = Progress(stall_s, clock())
        self._told = False

    def start(self) -> None:
        """Watch until `stop`."""
        for work, name in ((self._scrape_loop, "watch"), (self._canary_loop, "watch-canary")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def stop(self) -> None:
        """Watch no longer; threads end by themselves."""
        self._stopped.set()

    def _scrape_loop(self) -> None:
        """Read the counters; a read that comes too late is no verdict by itself."""
        limit_s = min(10.0, max(self._interval_s, self._stall_s / 8))
        while not self._stopped.wait(self._interval_s):
            try:
                answer = self._client.get("/metrics", timeout_s=limit_s)
            except (EngineUnreachableError, EngineSilentError) as error:
                reachable = isinstance(error, EngineSilentError)
                with self._lock:
                    self._progress.scrape_failed(reachable=reachable, now=self._clock())
            else:
                self._read(answer)
            self._judge()

    def _read(self, answer: Answer) -> None:
        now, text = self._clock(), answer.text()
        if answer.status != _OK:  # an error has no counters, which must not look like progress
            with self._lock:
                self._progress.scrape_failed(reachable=True, now=now)
            return
        with self._lock:
            sample = parse_metrics(text)
            self._progress.scraped(sample, in_flight=self._in_flight(), now=now)
        self.status = replace(self.status, engine_metrics=text, scraped_at=now)

    def _judge(self) -> None:
        with self._lock:
            health, waited_s, detail = self._progress.health(self._clock())
        self.status = replace(self.status, health=health, waited_s=waited_s, detail=detail)
        bad = health in {Health.STALLED, Health.GONE}
        if bad and not self._told and not self._stopped.is_set():
            self._told = True
            self._on_verdict(self.status)

    def _canary_loop(self) -> None:
        while not self._stopped.wait(self._interval_s):
            with self._lock:
                due = self._progress.canary_due(self._clock())
                if due:
                    self._progress.canary_sent(self._clock())
            if due:
                answered = self._ask()
                with self._lock:
                    self._progress.canary_done(answered=answered, now=self._clock())

    def _ask(self) -> bool:
        body = {"model": self._served_name, "prompt": "1", "max_tokens": 1, "temperature": 0.0}
        try:
            answer = self._client.post("/v1/completions", body, timeout_s=self._stall_s / 2)
        except (EngineUnreachableError, EngineSilentError):
            return False
        return answer.status == _OK
