"""The parts of jsonrpcserver that recapd uses, without the rest.

Its package also imports jsonschema and an HTTP server, for things that recapd does itself. That was
a third of the time from start to first answer, so the package's own `__init__` is left out here; it
runs as ever where somebody imports the whole of it later.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from typing import Final

_PACKAGE: Final = "jsonrpcserver"


@contextmanager
def _without_its_init() -> Generator[None]:
    """Its modules can be imported within the block though the package itself was not run."""
    spec = find_spec(_PACKAGE)
    if _PACKAGE in sys.modules or spec is None:
        yield
        return
    sys.modules[_PACKAGE] = module_from_spec(spec)
    try:
        yield
    finally:
        del sys.modules[_PACKAGE]


with _without_its_init():
    from jsonrpcserver.async_dispatcher import dispatch_request
    from jsonrpcserver.request import Request
    from jsonrpcserver.result import Error, Success

__all__ = ["Error", "Request", "Success", "dispatch_request"]
