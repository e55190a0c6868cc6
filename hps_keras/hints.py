"""Hints that a script hears once, however often it does what they are about."""

from __future__ import annotations

import logging

from hps_keras import cluster

logger = logging.getLogger("hps_keras")

_said: set[str] = set()


def say_once(text: str) -> None:
    """Warns on the chief, the first time."""
    if text in _said or (cluster.is_initialized() and (cluster.is_server() or cluster.rank())):
        return
    _said.add(text)
    logger.warning("%s", text)
