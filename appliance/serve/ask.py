"""Asking the admin port of a running appliance from a command."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.serve.address import AddressError, admin_address

if TYPE_CHECKING:
    from argparse import Namespace

TIMEOUT_S = 10.0
_FIRST_ERROR = 400


def ask_admin(arguments: Namespace, method: str, path: str) -> str:
    """Return the body of the admin port's answer.

    Raises:
        ApplianceError: 2 if the arguments name no address, 41 if no appliance answers there or it
            refuses.
    """
    try:
        host, port = admin_address(arguments)
    except AddressError as error:
        what, fix = "must name the admin port", "use --url, --port, --config or --state-dir"
        fault = Fault("ADMIN_ADDRESS", "arguments", what, str(error), fix)
        raise ApplianceError(ExitCode.USAGE, fault) from error
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, headers={"Connection": "close"})
        response = connection.getresponse()
        body = response.read().decode()
        refused = response.status >= _FIRST_ERROR
        value = f"HTTP {response.status} {body.strip()}"
    except (OSError, http.client.HTTPException) as error:
        refused, body, value = True, "", str(error) or type(error).__name__
    finally:
        connection.close()
    if refused:
        what = "a running appliance must answer there"
        fix = "start it, or say where its admin port is with --url, --config or --state-dir"
        fault = Fault("NOT_RUNNING", f"http://{host}:{port}{path}", what, value, fix)
        raise ApplianceError(ExitCode.ENGINE_DIED, fault)
    return body
