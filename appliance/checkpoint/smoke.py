"""Tries tokenizer and chat template of a checkpoint in a child process with little time and memory.

Both are data of whoever made the checkpoint: a template is a program, and a tokenizer file can end
the library that reads it. `python -m appliance.checkpoint.smoke PART DIR SIZE` is the child.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from appliance.checkpoint.document import as_object, is_regular, parse_unique, read_document
from appliance.checkpoint.template import (
    TemplateProblem,
    find_templates,
    read_template,
    try_template,
)
from appliance.errors import Fault

CPU_S: Final = 20
MEMORY_BYTES: Final = 6 * 1024**3

_TEXT: Final = "Hello, world! 1234 übergroß"
_AGAIN: Final = "fetch it again, or export the checkpoint again"


@dataclass(frozen=True)
class Outcome:
    """What a try gave: one sentence, or the fault."""

    detail: str
    fault: Fault | None = None


def try_part(
    part: str, root: Path, vocab_size: int, *, cpu_s: int = CPU_S, file: Path | None = None
) -> Outcome:
    """Try `tokenizer` or `template` of a checkpoint in a child process.

    Args:
        part: Which.
        root: Directory of the checkpoint.
        vocab_size: Rows of the embedding; ids beyond are refused.
        cpu_s: Processor time that the child may take.
        file: Template that stands for the checkpoint's own.
    """
    code = {"tokenizer": "E_TOKENIZER", "template": "E_CHAT_TEMPLATE"}[part]
    given = () if file is None else (str(file),)
    child = (sys.executable, "-m", __spec__.name)
    words = (*child, part, str(root), str(vocab_size), str(cpu_s), *given)
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=cpu_s * 10,  # wall time on a busy machine
            check=False,
        )
        report = as_object(json.loads(done.stdout)) or {}
    except (subprocess.TimeoutExpired, ValueError):
        what = f"to be tried within {cpu_s} s and {MEMORY_BYTES >> 30} GiB"
        fault = Fault(code, f"{root} {part}", what, "more, or a crash", "do not serve this file")
        return Outcome("", fault)
    if "detail" in report:
        return Outcome(str(report["detail"]))
    parts = [str(report.get(key, "")) for key in ("where", "what", "value", "fix")]
    return Outcome("", Fault(str(report.get("code", code)), *parts))


def main(arguments: list[str]) -> None:
    """Be the child: try one part and print the outcome as JSON."""
    part, root, vocab_size, cpu_s = arguments[0], Path(arguments[1]), *map(int, arguments[2:4])
    file = Path(arguments[4]) if arguments[4:] else None
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    report = _tokenizer(root, vocab_size) if part == "tokenizer" else _template(root, file)
    sys.stdout.write(json.dumps(report))


def _fault(code: str, where: Path, what: str, value: object) -> dict[str, str]:
    text = {"what": what, "value": str(value)[:200], "fix": _AGAIN}
    return {"code": code, "where": str(where)} | text


def _tokenizer(root: Path, vocab_size: int) -> dict[str, str]:
    path = root / "tokenizer.json"
    if not is_regular(path):
        names = [path.name for path in root.glob("*.model")] or ["vocab.json"]
        if not any(is_regular(root / name) for name in (*names, "vocab.json", "tekken.json")):
            return _fault("E_TOKENIZER_MISSING", path, "a tokenizer beside the weights", "none")
        return {"detail": f"{names[0]} is there; only tokenizer.json can be tried here"}
    try:
        table = as_object(parse_unique(path.read_bytes(), is_bounded=False))
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return _fault("E_TOKENIZER", path, "a JSON object", error)
    model = as_object((table or {}).get("model"))
    if model is None or not model.get("vocab"):
        return _fault("E_TOKENIZER", path, "a model with a vocabulary", "none")
    if importlib.util.find_spec("tokenizers") is None:
        return {"detail": "well formed; not tried, as the package tokenizers is not installed"}
    return _encode(path, vocab_size)


def _encode(path: Path, vocab_size: int) -> dict[str, str]:
    from tokenizers import Tokenizer  # noqa: PLC0415 - heavy, and not everywhere

    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
        ids: list[int] = tokenizer.encode(_TEXT).ids
        text = tokenizer.decode(ids)
        largest = max((*tokenizer.get_vocab(with_added_tokens=True).values(), *ids, 0))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        return _fault("E_TOKENIZER", path, "a tokenizer that encodes and decodes", error)
    if not ids or not text.strip():
        return _fault("E_TOKENIZER", path, f"tokens of {_TEXT!r}", f"{len(ids)} tokens, {text!r}")
    if largest >= vocab_size:
        what = f"ids below the {vocab_size} rows of the embedding"
        return _fault("E_TOKENIZER", path, what, largest)
    return {"detail": f"{len(ids)} tokens there and back, ids up to {largest} of {vocab_size}"}


def _template(root: Path, file: Path | None) -> dict[str, str]:
    try:
        settings_path = root / "tokenizer_config.json"
        settings = read_document(settings_path) if is_regular(settings_path) else {}
        templates = find_templates(root, settings) if file is None else read_template(file)
        tried = [
            (where, try_template(where, source, settings)) for where, source in templates.items()
        ]
    except TemplateProblem as problem:
        return _fault("E_CHAT_TEMPLATE", root / problem.where, problem.what, problem.value)
    except (RecursionError, MemoryError) as error:
        return _fault("E_CHAT_TEMPLATE", root, "a template that ends", type(error).__name__)
    if not tried:
        return {"detail": ""}
    return {"detail": ", ".join(f"{where}: {length} letters" for where, length in tried)}


if __name__ == "__main__":
    main(sys.argv[1:])
