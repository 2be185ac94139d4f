"""The entry point of `recapd` and of `python -m recapd.daemon`."""

from recapd.daemon.cli import main

if __name__ == "__main__":
    main()
