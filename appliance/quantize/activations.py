"""Runs the dense model over a text, one decoder layer in memory at a time.

The model's own code (transformers) is built without weights. A first pass over empty layers records
what it hands to each of them (positions, masks); afterwards every layer is filled from the
checkpoint, run over all windows of the text, and emptied again.
"""

from __future__ import annotations

import importlib
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from appliance.errors import ApplianceError, ExitCode, Fault
from appliance.quantize.gptq import tensor_of
from appliance.quantize.hooks import InputSums, stacked_parts

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from appliance.checkpoint.tensors import TensorReader
    from appliance.quantize.gptq import Moments
    from appliance.quantize.settings import Calibration

WINDOW = 512
"""Tokens that see each other."""

_HELD_OUT_EVERY = 5
_FEWEST_WINDOWS = 8
_WINDOWS_AT_ONCE = 4
_STACK_AXES = 3  # one matrix of every expert
_BYTES_OF_A_TOKEN = 16  # read of the text at most; ordinary text has 3 to 5
_LAYER = re.compile(r"((?:model\.|language_model\.){0,3}layers\.(\d+)\.).+")


@dataclass(frozen=True)
class Windows:
    """A text as token windows.

    Attributes:
        tokens: int64 [windows, WINDOW].
        held_out: bool [windows], those that calibration does not see: every fifth.
    """

    tokens: NDArray[np.int64]
    held_out: NDArray[np.bool_]


class _Recorded(Exception):  # noqa: N818 - no error: it ends the recording pass
    """Every layer has been called."""


def read_windows(source: Path, calibration: Calibration) -> Windows:
    """Cut a text into windows of the model's tokens.

    Raises:
        ApplianceError: QUANT_CALIBRATION, exit 2, if the text cannot be read or is too short;
            E_TOKENIZER_MISSING, exit 30, if the model has no tokenizer that can be loaded.
    """
    path = calibration.text
    try:
        with path.open("rb") as file:
            raw = file.read(calibration.tokens * _BYTES_OF_A_TOKEN)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise unfit(str(path), "a readable UTF-8 text file", reason) from None
    transformers: Any = importlib.import_module("transformers")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(source), local_files_only=True)
    except (OSError, ValueError) as error:
        fault = Fault(
            "E_TOKENIZER_MISSING",
            str(source),
            "a tokenizer beside the weights",
            str(error)[:160],
            "download the checkpoint with its tokenizer",
        )
        raise ApplianceError(ExitCode.CHECKPOINT_UNSUPPORTED, fault) from None
    text = raw.decode(errors="replace")
    found = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    windows = min(len(found), calibration.tokens) // WINDOW
    if windows < _FEWEST_WINDOWS:
        what = f"at least {_FEWEST_WINDOWS * WINDOW} tokens of text"
        raise unfit(str(path), what, str(len(found)))
    tokens = np.array(found[: windows * WINDOW], np.int64).reshape(windows, WINDOW)
    held_out = np.arange(windows) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
    return Windows(tokens, held_out)


class LayerWalk:
    """The decoder layers of one model, run one after the other."""

    def __init__(self, reader: TensorReader, windows: Windows) -> None:
        """Build the model without weights and record what it hands to its layers.

        Raises:
            ApplianceError: QUANT_CALIBRATION, exit 2, if the model's code cannot be run so.
        """
        self._reader = reader
        self._windows = windows
        self._prefixes = _prefixes(reader)
        root = str(reader.root)
        transformers: Any = importlib.import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(root, local_files_only=True)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config.get_text_config(), dtype=torch.float32
            ).eval()
        self._decoder: Any = model.get_decoder()
        self._layers: list[torch.nn.Module] = list(self._decoder.layers)
        if len(self._layers) != len(self._prefixes):
            what = f"{len(self._layers)} layers, as config.json says"
            raise unfit(root, what, str(len(self._prefixes)))
        with torch.device("cpu"):
            self._decoder.rotary_emb = type(self._decoder.rotary_emb)(config=model.config)
        self._calls = self._record()

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._layers)

    def embed(self) -> NDArray[np.float32]:
        """Activations before the first layer, [windows * WINDOW, H].

        Raises:
            ApplianceError: E_MISSING_TENSOR, exit 30; QUANT_CALIBRATION, exit 2, if the tokenizer
                knows more tokens than the model.
        """
        name = f"{self._prefixes[0].partition('layers.')[0]}embed_tokens.weight"
        known, largest = self._reader.entry(name).shape[0], int(self._windows.tokens.max())
        if largest >= known:
            raise unfit(name, f"a row for every token of the text, {known} rows", str(largest))
        rows = self._reader.array(name)[self._windows.tokens.reshape(-1)]
        self._reader.release(name)
        if self._reader.entry(name).dtype == "BF16":
            return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return rows.astype(np.float32)

    def modules(self, layer: int) -> str:
        """Prefix of a layer's tensors in the checkpoint, such as `model.layers.0.`."""
        return self._prefixes[layer]

    def run(
        self, layer: int, hidden: NDArray[np.float32], inputs: Mapping[str, str]
    ) -> dict[str, Moments]:
        """Run one layer, `hidden` in place, and sum products of the inputs of some modules.

        Args:
            layer: Number of the layer.
            hidden: [windows * WINDOW, H], activations before it; behind it afterwards.
            inputs: Key of the result to module name inside the layer.

        Raises:
            ApplianceError: QUANT_CALIBRATION, exit 2, if the layer has no such module or tensor.
        """
        module = self._layers[layer]
        self._fill(layer, module)
        try:
            watched = InputSums(module, inputs)
        except AttributeError as error:
            what = "a model whose quantized matrices are modules of their own in transformers"
            raise unfit(self._prefixes[layer], what, str(error)[:120]) from None
        view = tensor_of(hidden).view(len(self._windows.tokens), WINDOW, -1)
        words, keywords = self._calls[layer]
        try:
            with torch.inference_mode(), _fast_products():
                for batch in self._batches():
                    watched.is_held_out = bool(self._windows.held_out[batch[0]])
                    result = module(view[batch], *words, **keywords)
                    view[batch] = result[0] if isinstance(result, tuple) else result
        finally:
            watched.remove()
            module.to("meta")
        return watched.sums

    def _batches(self) -> Iterable[list[int]]:
        """Window numbers of each call, held-out ones apart."""
        for kind in (False, True):
            found = [int(i) for i in np.flatnonzero(self._windows.held_out == kind)]
            for begin in range(0, len(found), _WINDOWS_AT_ONCE):
                yield found[begin : begin + _WINDOWS_AT_ONCE]

    def _fill(self, layer: int, module: torch.nn.Module) -> None:
        module.to_empty(device="cpu")
        prefix = self._prefixes[layer]
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if f"{prefix}{name}" in self._reader or parameter.ndim != _STACK_AXES:
                    parameter.copy_(self._tensor(f"{prefix}{name}"))
                    continue
                for expert, parts in enumerate(stacked_parts(name, len(parameter))):
                    rows = torch.cat([self._tensor(f"{prefix}{part}") for part in parts])
                    parameter[expert].copy_(rows)

    def _tensor(self, name: str) -> torch.Tensor:
        """Read one tensor as FP32 and give its pages back."""
        if name not in self._reader:
            what = "a tensor for every parameter of the layer"
            raise unfit(str(self._reader.root), what, f"no {name}")
        tensor = tensor_of(self._reader.float32(name))
        self._reader.release(name)
        return tensor

    def _record(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Arguments of every layer but the activations; the same for every window."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def recorder(hidden: torch.Tensor, *words: object, **keywords: object) -> torch.Tensor:
            calls.append((words, keywords))
            if len(calls) == len(self._layers):
                raise _Recorded
            return hidden

        for layer in self._layers:
            layer.forward = recorder
        width = int(self._decoder.config.hidden_size)
        try:
            with torch.inference_mode():
                self._decoder(inputs_embeds=torch.zeros(1, WINDOW, width), use_cache=False)
        except _Recorded:
            pass
        finally:
            for layer in self._layers:
                del layer.forward
        if len(calls) != len(self._layers):
            what = "the model calls every layer once"
            raise unfit(str(self._reader.root), what, f"{len(calls)} calls")
        return calls


@contextmanager
def _fast_products() -> Generator[None]:
    """Let FP32 products run as BF16 with FP32 sums where the processor has that (AMX, AVX-512)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _prefixes(reader: TensorReader) -> tuple[str, ...]:
    found: dict[int, str] = {}
    for name in reader.names():
        match = _LAYER.fullmatch(name)
        if match is not None:
            found.setdefault(int(match[2]), match[1])
    return tuple(found[number] for number in sorted(found))


def unfit(where: str, what: str, value: str) -> ApplianceError:
    """Make the error of a text, or of a model, that gives no activations."""
    fix = "give a longer text or another one, or use --mode fast, which needs none"
    return ApplianceError(ExitCode.USAGE, Fault("QUANT_CALIBRATION", where, what, value, fix))
