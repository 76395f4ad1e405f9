"""Where a running appliance's admin port is; for the verbs that ask it, quick to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from healthchecks import probes

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - looked up


class AddressError(Exception):
    """The address cannot be found out; the message says why."""


def reachable_host(host: str) -> str:
    """Return the address under which a listener on `host` is reached from this machine."""
    return _EVERYWHERE.get(host, host)


def add_address_arguments(parser: ArgumentParser) -> None:
    """Declare how the admin port is found: told, from a configuration, or from the run file."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--url", metavar="URL", help="admin address, as http://127.0.0.1:9400")
    place.add_argument("--port", type=int, metavar="N", help="admin port on 127.0.0.1")
    place.add_argument("--config", type=Path, metavar="FILE", help="read the address from it")
    place.add_argument(
        "--state-dir",
        default=probes.DEFAULT_STATE_DIR,
        metavar="DIR",
        help="read the address from the run file in this directory (default: %(default)s)",
    )


def admin_address(arguments: Namespace) -> tuple[str, int]:
    """Return host and port of the admin port.

    Raises:
        AddressError: If what was given names none.
    """
    if arguments.config is not None:
        return _from_config(arguments.config)
    given = {"url": arguments.url, "port": arguments.port, "state-dir": arguments.state_dir}
    try:
        told = {name: str(value) for name, value in given.items() if value is not None}
        return probes.address(told)
    except ValueError as error:
        raise AddressError(f"{arguments.url or arguments.port} is no address: {error}") from error


def _from_config(path: Path) -> tuple[str, int]:
    """Take the two keys that matter; the whole check of the file is `appliance validate`."""
    import yaml  # noqa: PLC0415 - only this way of asking needs it, and probes must stay quick

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        document = cast("dict[str, Any]", yaml.load(path.read_bytes(), loader))  # noqa: S506 - safe
        server = cast("dict[str, Any]", document.get("server") or {})
        host = str(server.get("admin_host", probes.DEFAULT_HOST))
        return reachable_host(host), int(server.get("admin_port", probes.DEFAULT_PORT))
    except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise AddressError(f"{path} names no admin port: {error}") from error
