"""Builds the API reference from the docstrings: `python docs/api.py [DIRECTORY]` (default `site`)."""

from __future__ import annotations

import sys
from pathlib import Path

MODULES = ("tile_ep", "tile_ep.nn", "tile_ep.autograd", "tile_ep.layout", "tile_ep.reference")
"""What has a page: the public names, the layer, its collectives, every size formula, the semantics in plain PyTorch."""


def build(directory: Path) -> None:
    """Write HTML pages into `directory`. Needs `pdoc`."""
    import pdoc

    import tile_ep

    for name in tile_ep.__all__:  # pdoc reads a module's dictionary, which names of optional parts enter when asked for
        vars(tile_ep)[name] = getattr(tile_ep, name)
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*MODULES, output_directory=directory)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("site")
    build(target)
    print(target / "index.html")
