"""Logger access for the package. Only entry points (CLI, server) call `configure_logging`."""

from __future__ import annotations

import logging


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; libraries never configure handlers."""
    return logging.getLogger(name)


def configure_logging(level: str = "WARNING") -> None:
    """Send Octavo's own log lines to stderr in one format. Called by entry points only."""
    logger = logging.getLogger("octavo")
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
        )
        logger.addHandler(handler)
    logger.propagate = False
