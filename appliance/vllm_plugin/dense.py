"""Linear layers that the checkpoint keeps in 16 or 8 bits beside its NVFP4 ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from appliance.vllm_plugin import compat, ledger, weights
from appliance.vllm_plugin.arrivals import WEIGHT, Arrivals
from appliance.vllm_plugin.linear import Loader, ShardId, forward, parts_of, stored_matrices
from appliance.vllm_plugin.ranges import refuse_beyond_fp16

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.vllm_plugin.tally import Tally


class DenseLinearMethod(compat.UnquantizedLinearMethod):
    """The engine's own dense method, which refuses weights that FP16 cannot hold.

    On the CPU the weight stays a plain parameter, as those of the decoded layers do: the engine
    would copy it into buffers that no count of parameters sees.
    """

    def __init__(self, site: str) -> None:
        """Keep the name of the layer for messages."""
        super().__init__()
        self.site = site
        self.on_cpu = compat.device_type() == "cpu"

    def process_weights_after_loading(self, layer: compat.Layer) -> None:
        """Check the range, then prepare the layer as the engine does on a GPU.

        Raises:
            ApplianceError: E_FP16_RANGE if a weight became infinite on its way to FP16.
        """
        refuse_beyond_fp16(layer.weight, f"{self.site}.weight")
        if self.on_cpu:
            weights.set_plain(layer, "weight", layer.weight.data)
        else:
            super().process_weights_after_loading(layer)

    def apply(
        self, layer: compat.Layer, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x * w^T + bias; x is [..., K], the result [..., N]."""
        if self.on_cpu:
            return functional.linear(x, layer.weight, bias)
        return super().apply(layer, x, bias)


class DenseEmbeddingMethod(compat.UnquantizedEmbeddingMethod):
    """The engine's own method of embeddings and dense heads, with `DenseLinearMethod`'s checks."""

    def __init__(self, site: str) -> None:
        """Keep the name of the layer for messages."""
        super().__init__()
        self.site = site
        self.on_cpu = compat.device_type() == "cpu"

    def process_weights_after_loading(self, layer: compat.Layer) -> None:
        """Check the range, then prepare the layer as the engine does on a GPU.

        Raises:
            ApplianceError: E_FP16_RANGE if a weight became infinite on its way to FP16.
        """
        refuse_beyond_fp16(layer.weight, f"{self.site}.weight")
        if not self.on_cpu:
            super().process_weights_after_loading(layer)

    def apply(
        self, layer: compat.Layer, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits x * w^T + bias; x is [..., K], the result [..., vocabulary]."""
        if self.on_cpu:
            return functional.linear(x, layer.weight, bias)
        return super().apply(layer, x, bias)


class Fp8LinearMethod(compat.LinearMethodBase):
    """Holds a linear layer in the compute type and decodes its E4M3 weights as they arrive.

    The checkpoint has one scale a matrix, a row or a block.
    """

    def __init__(
        self, leaves: Sequence[str], site: str, tally: Tally, scale_name: str = "weight_scale"
    ) -> None:
        """Keep which tensors the checkpoint has, and where to report bytes."""
        self.leaves = tuple(leaves)
        self.site = site
        self.tally = tally
        self.scale_name = scale_name
        self.arrivals = Arrivals(scale_name)
        self.matrices: tuple[ledger.Matrix, ...] = ()

    def create_weights(  # noqa: PLR0917 - the engine's signature
        self,
        layer: compat.Layer,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,  # noqa: ANN401 - the engine's signature
    ) -> None:
        """Register the parameters that the checkpoint's tensors are loaded into."""
        full_rows = compat.full_part_rows(layer, output_size)
        self.matrices = stored_matrices(self.site, self.leaves, full_rows, input_size)
        rows = sum(output_partition_sizes)
        loader: Loader = extra["weight_loader"]
        weight = compat.ModelWeightParameter(
            data=torch.empty(rows, input_size_per_partition, dtype=params_dtype),
            input_dim=1,
            output_dim=0,
            weight_loader=self._entering(WEIGHT, layer, loader),
        )
        layer.register_parameter("weight", weight)
        unread = {"input_scale": weights.dropped}
        read = {self.scale_name: self._entering(self.scale_name, layer, loader)}
        for name, entering in (unread | read).items():
            layer.register_parameter(
                name, weights.parameter(torch.empty(0), weight_loader=entering)
            )

    def _entering(self, suffix: str, layer: compat.Layer, loader: Loader) -> Loader:
        """Return a loader that hands a matrix on, decoded, when weight and scale are there."""

        def load(_: torch.nn.Parameter, loaded: torch.Tensor, shard: ShardId = None) -> None:
            parts = parts_of(shard, len(self.matrices))
            first = self.matrices[parts[0]]
            matrix = self.arrivals.enter(parts, suffix, first.name, loaded)
            if matrix is None:
                return
            rows = sum(self.matrices[part].rows for part in parts)
            matrix.check_shape(rows, first.columns)
            held: torch.nn.Parameter = layer.weight
            forward(loader, held, matrix.decode(held.dtype, held.device), shard)

        return load

    def process_weights_after_loading(self, layer: compat.Layer) -> None:
        """Check that every part came.

        Raises:
            ApplianceError: If a tensor is missing or came twice.
        """
        if not self.matrices:
            return
        for part, matrix in enumerate(self.matrices):
            self.arrivals.check_part(part, matrix.name)
        self.matrices = ()
        weight = layer.weight.data
        weights.drop_parameters(layer, ("weight", self.scale_name, "input_scale"))
        weights.set_plain(layer, "weight", weight)
        self.tally.add(weight.numel() + self.arrivals.scale_bytes, weight.nbytes)

    def apply(
        self, layer: compat.Layer, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x * w^T + bias; x is [..., K], the result [..., N]."""
        return functional.linear(x, layer.weight, bias)
