"""Log lines: what happened, never what was said. No message text, ids of clients' making, paths or
secrets.
"""

import json
import logging
import sys
import time
from typing import Literal, TextIO


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        self.converter = time.gmtime
        super().__init__(
            "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )

    def formatException(self, ei: object) -> str:  # the name is logging's
        return ""


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return json.dumps(
            {
                "at": f"{at}.{int(record.msecs):03d}Z",
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": record.getMessage(),
            }
        )


def set_up_logging(
    level: Literal["debug", "info", "warning", "error"],
    form: Literal["text", "json"],
    stream: TextIO = sys.stderr,
) -> None:
    """Send the log to `stream`. Libraries are heard from `warning` on: at `debug` they log what
    they carry.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    logging.basicConfig(level="WARNING", handlers=[handler], force=True)
    logging.getLogger("recapd").setLevel(level.upper())
    # It logs the text of exceptions; every exception is ours by then, and logged without.
    logging.getLogger("jsonrpcserver").setLevel("CRITICAL")
