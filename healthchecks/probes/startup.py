"""Has the gate passed, and is the engine loading within its deadline or further than that?"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not __package__:
    # Run by its path with `python -I -S`: only the standard library is on the path then.
    sys.path.insert(0, __file__.rsplit("/healthchecks/", 1)[0])

from healthchecks.probes import main

if __name__ == "__main__":
    raise SystemExit(main("startup"))
