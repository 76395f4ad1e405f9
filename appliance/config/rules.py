"""Rules that tie keys of the configuration together; each is one named function."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from appliance.config.document import shown
from appliance.config.extra_args import verify_extra_args
from appliance.errors import Fault
from appliance.units import GIB, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import date

    from appliance.config.schema import Config

LONGEST_OVERRIDE_DAYS = 30


@dataclass(frozen=True)
class Broken:
    """One broken rule.

    Attributes:
        keys: Keys it was judged by; if one of them is itself faulty the rule says nothing.
        fault: The message.
    """

    keys: tuple[str, ...]
    fault: Fault


def verify_all(config: Config, where: Callable[[str], str], today: date) -> Iterator[Broken]:
    """Yield every rule that a configuration breaks.

    Args:
        config: A configuration whose single values are valid.
        where: Returns `file:line key` of a key.
        today: Day from which the age of overrides counts.
    """
    yield from verify_remote_access_has_keys(config, where)
    yield from verify_ports_differ(config, where)
    yield from verify_step_lengths(config, where)
    yield from verify_mode_fits_gpus(config, where)
    yield from verify_gpus_are_distinct(config, where)
    yield from verify_device_keys_apply(config, where)
    yield from verify_cpu_ranks(config, where)
    yield from verify_cache_size_is_whole(config, where)
    yield from verify_thresholds_are_ordered(config, where)
    yield from verify_override_ends(config, where, today)
    for key, fault in verify_extra_args(config.execution.extra_args, where):
        yield Broken((key,), fault)


def is_loopback(host: str) -> bool:
    """Tell whether an address reaches this machine only."""
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


def verify_remote_access_has_keys(config: Config, where: Callable[[str], str]) -> Iterator[Broken]:
    """Who listens for others must know them."""
    server = config.server
    if is_loopback(server.host) or server.api_keys_file is not None:
        return
    what = "needs server.api_keys_file, since the address is not loopback"
    fix = "set server.api_keys_file, or server.host: 127.0.0.1"
    fault = Fault("API_WITHOUT_KEYS", where("server.host"), what, shown(server.host), fix)
    yield Broken(("server.host", "server.api_keys_file"), fault)


def verify_ports_differ(config: Config, where: Callable[[str], str]) -> Iterator[Broken]:
    """The API and the admin port are two listeners."""
    if config.server.port == config.server.admin_port:
        what, fix = "must differ from server.port", "choose another port for one of them"
        place, value = where("server.admin_port"), str(config.server.admin_port)
        fault = Fault("PORTS_EQUAL", place, what, value, fix)
        yield Broken(("server.port", "server.admin_port"), fault)


def verify_step_lengths(config: Config, where: Callable[[str], str]) -> Iterator[Broken]:
    """A step takes at least one token a sequence, and a whole prompt where prompts are not cut."""
    memory, longest = config.memory, config.model.max_model_len
    key = "memory.max_num_batched_tokens"
    value = str(memory.max_num_batched_tokens)
    if memory.max_num_batched_tokens < memory.max_num_seqs:
        what = f"must be at least memory.max_num_seqs ({memory.max_num_seqs})"
        fix = f"raise it to {memory.max_num_seqs} or lower memory.max_num_seqs"
        yield Broken((key, "memory.max_num_seqs"), _conflict(where(key), what, value, fix))
    if (
        not config.execution.chunked_prefill
        and isinstance(longest, int)
        and memory.max_num_batched_tokens < longest
    ):
        what = f"must be at least model.max_model_len ({longest}) without chunked prefill"
        fix = f"raise it to {longest} or set execution.chunked_prefill: true"
        keys = (key, "model.max_model_len", "execution.chunked_prefill")
        yield Broken(keys, _conflict(where(key), what, value, fix))


def verify_mode_fits_gpus(config: Config, where: Callable[[str], str]) -> Iterator[Broken]:
    """The way the model is cut and the number of GPUs say the same."""
    gpus, mode = config.parallel.gpus, config.parallel.mode
    if isinstance(gpus, str):
        return
    keys = ("parallel.gpus", "parallel.mode")
    if not gpus:
        fix = "list at least one GPU, or write `all`"
        yield Broken(keys, _conflict(where(keys[0]), "must name a GPU", "an empty list", fix))
    elif mode == "single" and len(gpus) > 1:
        what, fix = "must name one GPU for mode `single`", "keep one of them, or set mode: auto"
        yield Broken(keys, _conflict(where(keys[0]), what, f"{len(gpus)} GPUs", fix))
    elif mode in ("tensor", "pipeline") and len(gpus) == 1:
        what, fix = f"must name two GPUs or more for mode `{mode}`", "add one, or set mode: single"
        yield Broken(keys, _conflict(where(keys[0]), what, "1 GPU", fix))


def verify_gpus_are_distinct(config: Config, where: Callable[[str], str]) -> Iterator[Broken]:
    """No GPU is named twice."""
    gpus = config.parallel.gpus
    named = [] if isinstance(gpus, str) else [str(gpu) for gpu in gpus]
    twice = sorted({gpu for gpu in named if named.count(gpu) > 1})
    if twice:
        place, fix = where("parallel.gpus"), "remove the second mention"
        fault = _conflict(place, "must name each GPU once", f"{', '.join(twice)} twice", fix)
        yield Broken(("parallel.gpus",), fault)


def verify_device_keys_apply(config: Config, where: Callable[[str], str]) -> Iterator[Broken]:
    """A key that the chosen device never reads is a mistake, not a wish."""
    cpu = config.execution.device == "cpu"
    wrong: list[tuple[str, str, str]] = []
    if cpu and config.memory.gpu_memory_utilization != "auto":
        value = f"{config.memory.gpu_memory_utilization:g}"
        wrong.append(("memory.gpu_memory_utilization", value, "set memory.kv_cache_size instead"))
    if cpu and config.parallel.gpus != "all":
        wrong.append(("parallel.gpus", "a list", "set parallel.cpu_ranks instead"))
    if cpu and config.execution.custom_all_reduce is True:
        wrong.append(("execution.custom_all_reduce", "true", "remove the line"))
    if not cpu and config.memory.kv_cache_size != "auto":
        fix = "set memory.gpu_memory_utilization instead"
        wrong.append(("memory.kv_cache_size", "a size", fix))
    if not cpu and config.parallel.cpu_ranks != 1:
        fix = "choose GPUs by parallel.gpus, or set execution.device: cpu"
        wrong.append(("parallel.cpu_ranks", str(config.parallel.cpu_ranks), fix))
    device = "cpu" if cpu else "cuda"
    for key, value, fix in wrong:
        what = f"has no meaning with execution.device `{device}`"
        yield Broken((key, "execution.device"), _conflict(where(key), what, value, fix))


def verify_cpu_ranks(config: Config, where: Callable[[str], str]) -> Iterator[Broken]:
    """The CPU engine cuts every layer or none; vLLM cannot run a pipeline on it."""
    mode, ranks = config.parallel.mode, config.parallel.cpu_ranks
    if config.execution.device != "cpu":
        return
    keys, place = (
        ("parallel.mode", "parallel.cpu_ranks", "execution.device"),
        where("parallel.mode"),
    )
    if mode == "pipeline":
        fix = "set mode: tensor"
        yield Broken(keys, _conflict(place, "must not be a pipeline on the CPU engine", mode, fix))
    elif mode == "single" and ranks > 1:
        what, fix = f"must be `tensor` for {ranks} CPU ranks", "set mode: tensor or cpu_ranks: 1"
        yield Broken(keys, _conflict(place, what, mode, fix))
    elif mode == "tensor" and ranks == 1:
        what = "must be `single` for one CPU rank"
        yield Broken(keys, _conflict(place, what, mode, "set mode: auto or raise cpu_ranks"))


def verify_cache_size_is_whole(config: Config, where: Callable[[str], str]) -> Iterator[Broken]:
    """The engine takes the cache of a CPU rank as a whole number of GiB."""
    size, ranks = config.memory.kv_cache_size, config.parallel.cpu_ranks
    if isinstance(size, int) and size % (ranks * GIB):
        what = f"must be a multiple of {ranks}GiB, a whole GiB for each of {ranks} ranks"
        if ranks == 1:
            what = "must be a whole number of GiB"
        fix = f"set it to {max(1, round(size / ranks / GIB)) * ranks}GiB"
        key = "memory.kv_cache_size"
        value = f"{size / GIB:g}GiB"
        yield Broken((key, "parallel.cpu_ranks"), _conflict(where(key), what, value, fix))


def verify_thresholds_are_ordered(config: Config, where: Callable[[str], str]) -> Iterator[Broken]:
    """A warning comes before the refusal it warns of, and a state is left below where it begins."""
    gate, leave = config.gate, config.runtime.thermal
    order: tuple[tuple[str, float, str, float, bool], ...] = (
        ("gate.ecc.retired_pages_warn", gate.ecc.retired_pages_warn,
         "gate.ecc.retired_pages_fail", gate.ecc.retired_pages_fail, False),
        ("gate.pcie.tensor_rate_fail", gate.pcie.tensor_rate_fail,
         "gate.pcie.tensor_rate_warn", gate.pcie.tensor_rate_warn, False),
        ("gate.pcie.pipeline_rate_fail", gate.pcie.pipeline_rate_fail,
         "gate.pcie.rate_warn", gate.pcie.rate_warn, False),
        ("gate.thermal.gpu_warn_c", gate.thermal.gpu_warn_c,
         "gate.thermal.slowdown_c", gate.thermal.slowdown_c, False),
        ("runtime.thermal.leave_gpu_c", leave.leave_gpu_c,
         "gate.thermal.gpu_warn_c", gate.thermal.gpu_warn_c, True),
        ("gate.thermal.hbm_margin_warn_c", gate.thermal.hbm_margin_warn_c,
         "runtime.thermal.leave_hbm_margin_c", leave.leave_hbm_margin_c, True),
    )  # fmt: skip
    for low_key, low, high_key, high, strict in order:
        if low > high or (strict and low == high):
            what = f"must be {'below' if strict else 'at most'} {high_key} ({high:g})"
            fix = "change one of the two"
            yield Broken((low_key, high_key), _conflict(where(low_key), what, f"{low:g}", fix))
    if gate.gpu_timeout > gate.timeout:
        what = f"must be at most gate.timeout ({format_seconds(gate.timeout)})"
        key, value = "gate.gpu_timeout", format_seconds(gate.gpu_timeout)
        yield Broken((key, "gate.timeout"), _conflict(where(key), what, value, "lower it"))


def verify_override_ends(
    config: Config, where: Callable[[str], str], today: date
) -> Iterator[Broken]:
    """An accepted deviation has to be looked at again within a month."""
    last = today + timedelta(days=LONGEST_OVERRIDE_DAYS)
    for number, override in enumerate(config.gate.overrides):
        if override.until > last:
            key = f"gate.overrides[{number}].until"
            what = f"must be at most {LONGEST_OVERRIDE_DAYS} days ahead, {last.isoformat()}"
            value, fix = override.until.isoformat(), f"set it to {last.isoformat()} or earlier"
            fault = Fault("OVERRIDE_TOO_LONG", where(key), what, value, fix)
            yield Broken(("gate.overrides",), fault)


def _conflict(place: str, what: str, value: str, fix: str) -> Fault:
    return Fault("CONFIG_CONFLICT", place, what, value, fix)
