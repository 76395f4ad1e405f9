"""Lets the engine's model classes of hybrids be imported without torchvision.

vLLM 0.27.1 defines the text model of the Qwen3.5 family in one file with the one for images, which
imports two modules of transformers that need torchvision. No image of the appliance has it, and no
text request reaches what those modules are for.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

_MODULES = {
    "transformers.models.qwen2_vl.image_processing_qwen2_vl": ("smart_resize",),
    "transformers.models.qwen3_vl.video_processing_qwen3_vl": (
        "Qwen3VLVideoProcessor",
        "smart_resize",
    ),
}
"""Modules that need torchvision, and the names that the engine imports from each."""


class _Absent:
    """Stands for a class or a function of a module that cannot be imported."""

    def __init__(self, *_: object, **__: object) -> None:
        """Refuse to be called.

        Raises:
            ImportError: Always.
        """
        raise ImportError("images and videos need torchvision, and this appliance serves text")


def stand_in_for_torchvision() -> None:
    """Put stand-ins where transformers would need torchvision, once, if it is not installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    for name, members in _MODULES.items():
        if name not in sys.modules:
            module = ModuleType(name, "Stands for a module that needs torchvision.")
            vars(module).update(dict.fromkeys(members, _Absent))
            sys.modules[name] = module
