"""recapd: a local daemon that owns, compacts and archives the histories of AI agents."""

__version__ = "0.1.0"
