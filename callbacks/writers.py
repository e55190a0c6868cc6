"""One writer: what all workers would write to the same file or folder is left to the chief."""

from __future__ import annotations

import logging
import os
from typing import Any

import keras

from hps_keras.worker.link import Link

logger = logging.getLogger("hps_keras")


def leave_to_the_chief(owner: Any, link: Link, rank: int) -> None:
    """Takes out of a worker's list what would write where a callback of the chief's writes; on all workers at once.

    A callback with another path, a folder for each worker for example, stays. Called before any callback has opened
    its file.

    Args:
        owner: The list of callbacks that Keras is going through.
        link: The line to the server.
        rank: This worker's rank.
    """
    mine = [(callback, _target(callback)) for callback in owner.callbacks]
    theirs = link.agree("writers", chief=[target for _, target in mine if target])
    if not rank:
        return
    out = [c for c, target in mine if target in theirs["chief"] or getattr(c, "chief_only", False)]
    if not out:
        return
    # In place: what Keras is going through is this very list.
    owner.callbacks[:] = [callback for callback, _ in mine if callback not in out]
    named = sorted({type(callback).__name__ for callback in out if not getattr(callback, "chief_only", False)})
    if rank == 1 and named:
        logger.warning(
            "%s: only the chief's runs, as all would write to the same place; give each worker a path of its own to "
            "have what each would write",
            ", ".join(named),
        )


def _target(callback: Any) -> list[str] | None:
    """The kind of a callback that writes, and where to; None for any other."""
    for kind, name in _PATHS:
        if isinstance(callback, kind) and getattr(callback, name, None):
            return [kind.__name__, os.path.abspath(os.fspath(getattr(callback, name)))]
    return None


_PATHS: Any = (
    (keras.callbacks.ModelCheckpoint, "filepath"),
    (keras.callbacks.BackupAndRestore, "backup_dir"),
    (keras.callbacks.CSVLogger, "filename"),
    (keras.callbacks.TensorBoard, "log_dir"),
)
