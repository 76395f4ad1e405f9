"""Parse command lines with vLLM's own parser and print what it understood, as JSON.

Usage: parse_argv.py FILE, where FILE holds a JSON object of name to list of words.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

WANTED = (
    "model",
    "served_model_name",
    "dtype",
    "max_model_len",
    "quantization",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "enforce_eager",
    "disable_custom_all_reduce",
    "middleware",
    "language_model_only",
    "chat_template",
    "trust_remote_code",
    "max_logprobs",
    "async_scheduling",
)


def main() -> int:
    """Write what was understood to stdout."""
    logging.disable(logging.CRITICAL)  # vLLM logs to stdout
    os.environ["VLLM_PLUGINS"] = ""  # only the parser is asked
    from vllm.entrypoints.openai.cli_args import make_arg_parser  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    parser = make_arg_parser(FlexibleArgumentParser())
    found: dict[str, dict[str, object]] = {}
    for name, words in json.loads(Path(sys.argv[1]).read_text()).items():
        arguments = parser.parse_args(words)
        found[name] = {key: getattr(arguments, key) for key in WANTED}
        backend = arguments.attention_backend
        found[name]["attention_backend"] = getattr(backend, "name", backend)
        compilation = arguments.compilation_config
        found[name]["cudagraph_mode"] = getattr(compilation.cudagraph_mode, "name", None)
        found[name]["compilation_mode"] = getattr(compilation.mode, "name", None)
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
