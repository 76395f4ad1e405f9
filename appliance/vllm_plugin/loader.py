"""The engine's loader of safetensors, which looks at the range of every tensor on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.vllm_plugin import compat
from appliance.vllm_plugin.ranges import RangeWatch

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch


class RangeCheckedLoader(compat.DefaultModelLoader):
    """Loads as the engine does; norms, biases and the like have no method that could look."""

    watch: RangeWatch | None = None

    def get_all_weights(
        self, model_config: compat.Layer, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Give every tensor of the checkpoint by its name."""
        tensors = super().get_all_weights(model_config, model)
        return tensors if self.watch is None else self.watch.over(tensors)

    def load_weights(self, model: torch.nn.Module, model_config: compat.Layer) -> None:
        """Fill the parameters of the model.

        Raises:
            ApplianceError: E_FP16_RANGE if FP16 cannot hold a value that this rank needs.
        """
        self.watch = RangeWatch(model.named_parameters())
        super().load_weights(model, model_config)
        self.watch.finish()
        self.watch = None
