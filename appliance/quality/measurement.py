"""What one served checkpoint says, as it is stored: everything that a comparison needs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from appliance.errors import ApplianceError, ExitCode, Fault

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FORMAT = 1


@dataclass(frozen=True)
class Window:
    """A piece of text, token by token; the first token has no prediction and is left out.

    Attributes:
        tokens: Token ids.
        logprobs: Natural logarithm of the probability of each token, given those before it.
        top: For each token the most probable ids with their logarithm, best first.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True)
class Measurement:
    """Everything measured of one checkpoint.

    Attributes:
        model: Name under which it was served.
        inputs: What was asked: digest of the text, sizes, version of the prompts. Two measurements
            can be compared if these are equal.
        windows: The text.
        answers: Greedy continuation of each bundled prompt.
        copied: Whether each number was repeated.
        solved: Whether each sum was right.
    """

    model: str
    inputs: Mapping[str, Any]
    windows: tuple[Window, ...]
    answers: tuple[str, ...]
    copied: tuple[bool, ...]
    solved: tuple[bool, ...]

    @property
    def tokens(self) -> int:
        """Number of predicted tokens."""
        return sum(len(window.tokens) for window in self.windows)

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative logarithm over all predicted tokens of the text."""
        total = sum(sum(window.logprobs) for window in self.windows)
        return math.exp(-total / self.tokens)

    def to_json(self) -> str:
        """Return the stored form."""
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":")) + "\n"


def load_measurement(path: Path) -> Measurement:
    """Read a stored measurement.

    Raises:
        ApplianceError: QUALITY_INPUT, exit 2.
    """
    try:
        stored = json.loads(path.read_bytes())
        _require_format(stored)
        return Measurement(
            str(stored["model"]),
            dict(stored["inputs"]),
            tuple(_window(each) for each in stored["windows"]),
            tuple(str(each) for each in stored["answers"]),
            tuple(bool(each) for each in stored["copied"]),
            tuple(bool(each) for each in stored["solved"]),
        )
    except OSError as error:
        fix = "name the measurement.json of an earlier run"
        raise unusable(str(path), "a measurement", error.strerror or "unreadable", fix) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason, fix = f"{type(error).__name__} {error}", "measure the reference again"
        raise unusable(str(path), "a measurement of this version", reason, fix) from None


def unusable(where: str, what: str, value: str, fix: str) -> ApplianceError:
    """Make the error of an input that cannot be used."""
    return ApplianceError(ExitCode.USAGE, Fault("QUALITY_INPUT", where, what, value[:200], fix))


def _require_format(stored: Mapping[str, Any]) -> None:
    if stored["format"] != FORMAT:
        raise ValueError(f"format {stored['format']}")


def _window(stored: Mapping[str, Any]) -> Window:
    tops = tuple(
        tuple((int(token), float(value)) for token, value in each) for each in stored["top"]
    )
    window = Window(
        tuple(int(token) for token in stored["tokens"]),
        tuple(float(value) for value in stored["logprobs"]),
        tops,
    )
    if not len(window.tokens) == len(window.logprobs) == len(window.top) > 0:
        raise ValueError("a window with lists of different lengths")
    return window
