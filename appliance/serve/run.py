"""One run of `appliance serve`: ports, state, gate, supervisor, and what is kept when it ends."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import time
import traceback
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.plan.adjustments import NO_ADJUSTMENTS
from appliance.render.argv import engine_command, vllm_argv
from appliance.render.environ import child_environment, environment, ignored_settings
from appliance.serve import handoff
from appliance.serve import state as kept
from appliance.serve.address import reachable_host
from appliance.serve.admin import AdminServer, AdminSource, check_port_free
from appliance.serve.board import Board
from appliance.serve.client import EngineClient
from appliance.serve.engine_cache import cache_root, remove_p2p_results
from appliance.serve.events import EventLog
from appliance.serve.gpus import watch_gpus
from appliance.serve.handoff import Handoff
from appliance.serve.judge import judge_start
from appliance.serve.keys import read_keys
from appliance.serve.ladder import Settings
from appliance.serve.last_run import LAST_RUN_FILE
from appliance.serve.metrics import package_version
from appliance.serve.observe import observe, oom_kills
from appliance.serve.outside import Ended, Launch, Outside
from appliance.serve.state import End, HostAction, Record, Running, StateDirectory
from appliance.serve.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from appliance.plan.launch_plan import LaunchPlan
    from appliance.serve.signals import StopSignals

ADMIN_FILE = "admin.json"
"""In the run directory: where the admin port listens, for probes that are not told."""

_COUNTED = frozenset(
    {
        ExitCode.ENGINE_START,
        ExitCode.ENGINE_DIED,
        ExitCode.GPU_FAULT,
        ExitCode.STALLED,
        ExitCode.BUG,
    }
)
_REFUSALS = frozenset(
    {
        ExitCode.NO_GPU,
        ExitCode.CONTAINER,
        ExitCode.GATE_FAILED,
        ExitCode.GATE_UNKNOWN,
        ExitCode.CHECKPOINT_UNSUPPORTED,
        ExitCode.CHECKPOINT_CORRUPT,
    }
)


@dataclass(frozen=True)
class _Run:
    """What one run works with."""

    plan: LaunchPlan
    log: EventLog
    directory: StateDirectory
    stop: StopSignals


def serve(plan: LaunchPlan, stop: StopSignals) -> int:
    """Serve the plan until it ends; return 0 after a clean stop.

    Raises:
        ApplianceError: With the exit code and the one message for everything else.
    """
    log = EventLog(plan.run.log_format, plan.run.log_level)
    try:
        return _serve_logged(plan, stop, log)
    finally:
        log.close()


def _serve_logged(plan: LaunchPlan, stop: StopSignals, log: EventLog) -> int:
    log.info("serve.start", version=package_version(), config=plan.config_path, pid=os.getpid())
    for warning in plan.warnings:
        log.warning("plan.warning", text=warning)
    directory = StateDirectory(state_path(plan))
    try:
        ended = _serve(_Run(plan, log, directory, stop))
    except ApplianceError:
        raise
    except Exception as error:
        log.emit("error", "serve.bug", {"traceback": traceback.format_exc()})
        what, fix = "the appliance must not fail itself", "report this with the lines above"
        fault = Fault("BUG", "appliance.serve", what, f"{type(error).__name__}: {error}", fix)
        raise ApplianceError(ExitCode.BUG, fault) from error
    finally:
        directory.close()
    code = ended.exit_code
    log.emit(
        "info" if code is ExitCode.OK else "error",
        "serve.end",
        {"exit_code": int(code), "code": None if ended.fault is None else ended.fault.code},
    )
    if ended.fault is not None:
        raise ApplianceError(code, ended.fault)
    return int(code)


def state_path(plan: LaunchPlan) -> Path:
    """Return the directory that survives the container."""
    return Path(str(plan.gate["state_dir"]))


def hold_back(directory: StateDirectory, fault: Fault, wait: Callable[[float], bool]) -> bool:
    """Keep a refusal quiet that was said less than a minute ago, so that a restart loop stays calm.

    A person at a terminal is never kept waiting.

    Args:
        directory: Remembers what was said when.
        fault: The refusal.
        wait: Waits that many seconds; True if a stop was asked for meanwhile.

    Returns:
        True if a stop was asked for while waiting.
    """
    record = directory.load()
    quiet = 0.0 if sys.stderr.isatty() else kept.quiet_s(record, code=fault.code, now=time.time())
    stopped = quiet > 0 and wait(quiet)
    if not stopped:
        said = End(time.time(), 0, fault.code)
        with suppress(OSError):  # a full disk must not hide the refusal itself
            directory.save(replace(directory.load(), refusal=said))
    return stopped


def _serve(run: _Run) -> Ended:
    plan, directory = run.plan, run.directory
    check_keys(plan)
    with ExitStack() as stack:
        admin = AdminServer(plan.server.listen_admin_host, plan.server.admin_port)
        stack.callback(admin.close)
        check_port_free(plan.server.listen_host, plan.server.port)
        token = secrets.token_urlsafe(32)
        orders = directory.run / "handoff.json"
        stack.callback(orders.unlink, missing_ok=True)
        with _writable(directory):
            board = Board.create(directory.run / "board")
            _handoff(plan, directory.run / "board", token).write(orders)
            address = {"host": plan.server.listen_admin_host, "port": admin.port}
            kept.write_atomically(directory.run / ADMIN_FILE, json.dumps(address) + "\n")
        stack.callback((directory.run / ADMIN_FILE).unlink, missing_ok=True)
        record = _begin(run)
        outside = _outside(run, board, orders, token)
        recent = kept.recent_ends(record, per_s=plan.run.restart_per_s, now=time.time())
        supervisor = Supervisor(Settings(plan, NO_ADJUSTMENTS), outside, recent_ends=len(recent))
        refusal = _refusal(run, record) or _note_running(run, record)
        if refusal is not None:
            supervisor.refuse(*refusal)
        run.stop.listen(supervisor.request_stop)
        admin.start(
            AdminSource(
                lambda: supervisor.snapshot,
                supervisor.beat_age_s,
                board,
                supervisor.request_stop,
            )
        )
        ended = _supervise(run, supervisor) if refusal is None else Ended(*refusal)
        if ended.exit_code not in _REFUSALS and refusal is None:
            return ended
        return _said_quietly(run, supervisor, ended)


@contextmanager
def _writable(directory: StateDirectory) -> Generator[None]:
    """Turn a directory that takes no files (full, over its quota) into a refusal."""
    try:
        yield
    except OSError as error:
        fault = kept.directory_fault(directory.path, error)
        raise ApplianceError(ExitCode.CONTAINER, fault) from error


def _note_running(run: _Run, record: Record) -> tuple[ExitCode, Fault] | None:
    """Keep that a run begins and the room for its end; a volume too full for both refuses it.

    A run whose end cannot be kept is taken for a killed one by the next start, and no budget ever
    counts it.
    """
    running = Running(time.time(), kept.boot_id())
    try:
        run.directory.reserve()
        run.directory.save(replace(record, running=running), spare=False)
    except OSError as error:
        return ExitCode.CONTAINER, kept.directory_fault(run.directory.path, error)
    return None


def _supervise(run: _Run, supervisor: Supervisor) -> Ended:
    """Run, and keep what the run leaves behind."""
    ended = supervisor.run()
    _finish(run, ended)
    return ended


def _said_quietly(run: _Run, supervisor: Supervisor, ended: Ended) -> Ended:
    """Hold a repeated refusal back; a stop signal meanwhile makes it a clean end."""
    if ended.fault is not None and hold_back(run.directory, ended.fault, supervisor.hold):
        return Ended(ExitCode.OK)
    return ended


def _begin(run: _Run) -> Record:
    """Read the record and note a run that was killed."""
    record = run.directory.load()
    if kept.rebooted(record, boot_id=kept.boot_id()):
        run.log.warning(
            "serve.unclean_reboot",
            code="UNCLEAN_REBOOT",
            effect="the host went down while the last run served; check power and cooling",
        )
        record = replace(record, running=None)
        _save(run, record)
    unclean = kept.unclean_end(record, boot_id=kept.boot_id(), now=time.time())
    if unclean is not None:
        run.log.warning("serve.unclean_stop", effect="the last run was killed; it counts as an end")
        record = replace(record, ends=(*record.ends, unclean), running=None)
        _save(run, record)
    return record


def _refusal(run: _Run, record: Record) -> tuple[ExitCode, Fault] | None:
    budget = kept.budget_fault(
        record,
        count=run.plan.run.restart_count,
        per_s=run.plan.run.restart_per_s,
        now=time.time(),
        path=run.directory.file,
    )
    host = kept.host_action_fault(
        record,
        boot_id=kept.boot_id(),
        namespace=kept.pid_namespace(),
        path=run.directory.file,
    )
    if host is not None:
        return ExitCode.GATE_FAILED, host
    return None if budget is None else (ExitCode.ENGINE_DIED, budget)


def _finish(run: _Run, ended: Ended) -> None:
    """Keep how the run ended, for the restart budget, the next start and `doctor`."""
    record = replace(run.directory.load(), running=None)
    code = "OK" if ended.fault is None else ended.fault.code
    if ended.exit_code in _COUNTED:
        end = End(time.time(), int(ended.exit_code), code)
        record = replace(record, ends=(*record.ends, end))
    if ended.leftover:
        marker = HostAction(kept.boot_id(), kept.pid_namespace(), ended.leftover)
        record = replace(record, host_action=marker)
        run.log.error("serve.host_action_required", processes=ended.leftover)
    _save(run, record)
    if ended.exit_code is not ExitCode.OK:
        last = {
            "at": time.time(),
            "exit_code": int(ended.exit_code),
            "code": code,
            "message": "" if ended.fault is None else str(ended.fault),
            "fault": None if ended.fault is None else asdict(ended.fault),
            "returncode": ended.returncode,
            "lines": ended.tail,
        }
        _keep_last_run(run, last)


def _keep_last_run(run: _Run, last: Mapping[str, object]) -> None:
    """Replace what the run before left; without room for both, its lines make place."""
    path, text = run.directory.path / LAST_RUN_FILE, json.dumps(last, indent=1) + "\n"
    try:
        try:
            kept.write_atomically(path, text)
        except OSError:
            path.unlink(missing_ok=True)
            kept.write_atomically(path, text)
    except OSError as error:
        run.log.warning("serve.last_run_not_saved", path=str(path), error=str(error))


def _save(run: _Run, record: Record) -> None:
    try:
        run.directory.save(record)
    except OSError as error:
        seen = {"path": str(run.directory.file), "error": str(error)}
        effect = "the next start knows nothing of this one's end, or takes it for killed"
        run.log.emit("error", "serve.state_not_saved", {**seen, "effect": effect})


def _handoff(plan: LaunchPlan, board: Path, token: str) -> Handoff:
    server = plan.server
    return Handoff(
        board=str(board),
        token=token,
        api_keys_file=server.api_keys_file,
        max_request_bytes=server.max_request_bytes,
        max_concurrent_requests=server.max_concurrent_requests,
        requests_per_minute_per_key=server.requests_per_minute_per_key,
    )


def _outside(run: _Run, board: Board, orders: Path, token: str) -> Outside:
    plan = run.plan
    killed_before = oom_kills()

    def launch(settings: Settings) -> Launch:
        items = vllm_argv(settings.plan, settings.adjustments)
        variables = environment(settings.plan, settings.adjustments)
        whole, dropped = child_environment(variables, os.environ)
        if dropped:
            run.log.warning("engine.environment_dropped", names=dropped)
        ignored = ignored_settings(os.environ)
        if ignored:
            run.log.warning("environment.ignored", names=ignored, effect="the file decides")
        _forget_p2p_results(run.log, whole)
        return Launch(engine_command(items), {**whole, handoff.VARIABLE: str(orders)})

    return Outside(
        log=run.log,
        board=board,
        client=EngineClient(reachable_host(plan.server.listen_host), plan.server.port, token),
        gate=lambda: judge_start(plan, run.log),
        launch=launch,
        observe=lambda: observe(plan),
        config_sha256=lambda: _sha256(Path(plan.config_path)),
        watch_gpus=lambda on_fault, stalled_s: watch_gpus(plan, on_fault, stalled_s),
        oom_kills=lambda: oom_kills() - killed_before,
    )


def _forget_p2p_results(log: EventLog, environ: Mapping[str, str]) -> None:
    """Remove the engine's stored peer access results, so that it looks at these GPUs anew."""
    for path, error in remove_p2p_results(cache_root(environ)):
        if error:
            log.warning("engine.p2p_cache_kept", path=str(path), error=error)
        else:
            log.info("engine.p2p_cache_removed", path=str(path))


def check_keys(plan: LaunchPlan) -> None:
    """Read the key file once, so that a missing one is known before anything is loaded.

    Raises:
        ApplianceError: 10 if it cannot be read or holds no key.
    """
    name = plan.server.api_keys_file
    if name is None:
        return
    where, fix = f"server.api_keys_file {name}", "write one key a line, readable by this user"
    try:
        found = len(read_keys(Path(name)))
        value = "no key"
    except (OSError, UnicodeDecodeError) as error:
        found, value = 0, str(error)
    if not found:
        fault = Fault("API_KEYS_FILE", where, "must hold at least one API key", value, fix)
        raise ApplianceError(ExitCode.CONFIG, fault)


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
