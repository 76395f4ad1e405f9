"""Makes vLLM know the method; imported only inside `register()`."""

from __future__ import annotations

from appliance.vllm_plugin import compat, compat_requests
from appliance.vllm_plugin.config import METHOD, Nvfp4Config
from appliance.vllm_plugin.dense import DenseLinearMethod, Fp8LinearMethod
from appliance.vllm_plugin.hybrid import offer_hybrids
from appliance.vllm_plugin.linear import Nvfp4LinearMethod
from appliance.vllm_plugin.loader import RangeCheckedLoader

ATTENTION = "appliance.vllm_plugin.attention.PagedBackend"
LINEAR_METHODS = (DenseLinearMethod, Fp8LinearMethod, Nvfp4LinearMethod)


def register_nvfp4() -> None:
    """Check the engine's version, then register the method and the attention backend CUSTOM once.

    The kernel library is loaded, and its ABI checked, by the processes that compute.

    Raises:
        ApplianceError: If this vLLM is not one that the plugin was made for.
    """
    compat.check_version()
    compat.offer_method(METHOD, Nvfp4Config, LINEAR_METHODS)
    compat.offer_attention(ATTENTION)
    compat.offer_loader(RangeCheckedLoader)
    offer_hybrids()
    compat_requests.check_requests()
