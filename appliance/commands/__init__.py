"""One verb of the command line a file, imported only when it is asked for.

Each module defines `HELP` (one line), `configure(parser)` and `run(arguments) -> int`.
"""
