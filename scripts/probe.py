"""`python -m scripts.probe SOCKET`: ping a daemon every millisecond until stdin ends.

Prints the longest round trip, in milliseconds: no stall of the daemon's event loop was longer. How
long this process itself waited for a processor is in it.
"""

import select
import sys
from pathlib import Path

from scripts.targets import Wire

PAUSE_S = 0.001


def main() -> None:
    """Measure and print."""
    wire = Wire(Path(sys.argv[1]))
    longest_us = wire.timed_us("protocol.ping")
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
        longest_us = max(longest_us, wire.timed_us("protocol.ping"))
    wire.close()
    print(longest_us / 1000)


if __name__ == "__main__":
    main()
