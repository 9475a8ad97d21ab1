"""`python -m tile_ep.cli`."""

from tile_ep.cli import main

if __name__ == "__main__":  # worker processes import this module too
    main()
