"""`torchrun ... scripts/bench_variant.py KIND bench ...`: `tile-ep` with another variant of the kernels in every process."""

from __future__ import annotations

import sys

from tile_ep.cli import main
from tile_ep.selftest_processes import use_tuning

if __name__ == "__main__":
    use_tuning(sys.argv.pop(1))
    main()
