"""The kernels, written in TileLang, and what compiles and launches them. Importing any part of it needs TileLang."""

from tile_ep.errors import BackendUnavailableError

try:
    import tilelang  # noqa: F401
except ImportError as error:
    raise BackendUnavailableError(
        f"the nvlink backend and the simulator need TileLang ({error}): pip install 'tile-ep[gpu]', "
        "in a checkout pip install -e '.[sim]'"
    ) from error
