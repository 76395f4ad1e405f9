"""Runs inside vLLM processes: the quantization method `nvfp4`.

Nothing is imported at import time. vLLM logs and swallows an error while the entry point is
imported, and would go on without the format; an error raised by `register()` itself ends the
process with its reason.
"""

from __future__ import annotations


def register() -> None:
    """Make vLLM know the quantization method `nvfp4`; may be called any number of times.

    Raises:
        ApplianceError: If this vLLM is not one that the plugin was made for.
    """
    from appliance.vllm_plugin.registration import register_nvfp4  # noqa: PLC0415 - see the module's text

    register_nvfp4()
