"""daemon/jsonrpc.py: a part of a package, which must neither bring the rest nor hide it."""

import subprocess
import sys


def run(program: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_a_start_does_not_import_what_validates_and_serves_http() -> None:
    """It was a third of the time to the first answer."""
    run(
        "import sys, recapd.daemon.lifecycle\n"
        "assert 'jsonrpcserver.async_dispatcher' in sys.modules\n"
        "assert sys.modules.keys().isdisjoint({'jsonschema', 'http.server', 'jsonrpcserver'})"
    )


def test_the_whole_package_can_be_imported_before_and_after() -> None:
    for order in (
        "import jsonrpcserver, recapd.daemon.jsonrpc as part",
        "import recapd.daemon.jsonrpc as part, jsonrpcserver",
    ):
        run(
            f"{order}\n"
            "assert jsonrpcserver.dispatch\n"
            "assert jsonrpcserver.Success is part.Success\n"
            "from jsonrpcserver import async_dispatcher\n"
            "assert async_dispatcher.dispatch_request is part.dispatch_request"
        )
