"""Print the flags of the installed vLLM as JSON; `update.py --engine` stores them.

Runs as a script of its own, because importing vLLM takes long and configures logging.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys


def flag_table(parser: argparse.ArgumentParser) -> dict[str, dict[str, object]]:
    """Return every long flag: how it takes a value, of which type, out of which choices."""
    table: dict[str, dict[str, object]] = {}
    for action in parser._actions:
        names = [word[2:] for word in action.option_strings if word.startswith("--")]
        if not names or isinstance(action, argparse._HelpAction):
            continue
        table[names[0]] = _describe(action)  # the second name of a toggle is its `no-` form
    return dict(sorted(table.items()))


def _describe(action: argparse.Action) -> dict[str, object]:
    if isinstance(action, argparse.BooleanOptionalAction):
        return {"kind": "toggle"}
    if action.nargs == 0:
        return {"kind": "switch"}
    entry: dict[str, object] = {"kind": "value"}
    if action.type in (int, float):
        entry["type"] = action.type.__name__
    if action.choices:
        entry["choices"] = sorted(str(choice) for choice in action.choices)
    return entry


def main() -> int:
    """Write the table to stdout and nothing else."""
    logging.disable(logging.CRITICAL)
    os.environ["VLLM_PLUGINS"] = ""  # the flags are upstream's own
    import vllm  # noqa: PLC0415
    from vllm.entrypoints.openai.cli_args import make_arg_parser  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    parser = make_arg_parser(FlexibleArgumentParser())
    rows = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in flag_table(parser).items()]
    body = ",\n    ".join(rows)
    sys.stdout.write(f'{{\n  "vllm": "{vllm.__version__}",\n  "flags": {{\n    {body}\n  }}\n}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
