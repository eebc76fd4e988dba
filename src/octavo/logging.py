"""How log lines look. Only entry points (CLI, server) call `configure_logging`: a library does not."""

from __future__ import annotations

import logging


def configure_logging(level: str = "WARNING") -> None:
    """Send Octavo's own log lines to stderr in one format."""
    logger = logging.getLogger("octavo")
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(line, "%H:%M:%S"))
        logger.addHandler(handler)
    logger.propagate = False
