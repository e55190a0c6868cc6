"""What a server does not know by itself when it has run none of the script: the back end, and classes of its own."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

logger = logging.getLogger("hps_keras")


def adopt_backend(name: str) -> None:
    """Makes Keras, if this process has not imported it yet, run on the workers' back end: a script may choose it late.

    Args:
        name: ``"tensorflow"``, ``"jax"`` or ``"torch"``.
    """
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = name


def find_classes(places: Iterable[Sequence[str]]) -> dict[str, type]:
    """Finds classes that Keras does not know in the modules that define them, importing these.

    Args:
        places: Module and name of each. Those of ``__main__`` are found where the script defines them above
            ``hps.init()``.

    Returns:
        Those that were found, by name.
    """
    found = {}
    for module, name in places:
        try:
            holder: Any = importlib.import_module(module)
        except Exception as error:  # whatever a script's module may raise
            logger.warning("the parameter server cannot import %s, which defines %s: %s", module, name, error)
            continue
        for part in name.split("."):
            holder = getattr(holder, part, None)
        if isinstance(holder, type):
            found[name.rsplit(".", 1)[-1]] = holder
    return found
