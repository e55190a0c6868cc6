"""Lets Keras's `train_on_batch` find the exchange, which it gives no callback and no other place to begin."""

from __future__ import annotations

import functools
from typing import Any

import keras


def let_train_on_batch_exchange() -> None:
    """Wraps ``keras.Model.train_on_batch``, once in this process; models with plain optimizers notice nothing."""
    original = keras.Model.train_on_batch
    if hasattr(original, "_hps_wrapped"):
        return

    @functools.wraps(original)
    def train_on_batch(model: Any, x: Any, y: Any = None, sample_weight: Any = None, *more: Any, **named: Any) -> Any:
        from hps_keras.worker import loop  # which needs what calls this

        exchanging = getattr(model, "compiled", False) and loop.attach(model, (x, y, sample_weight))
        try:
            return original(model, x, y, sample_weight, *more, **named)
        finally:
            if exchanging:
                loop.release(model)

    train_on_batch._hps_wrapped = True  # type: ignore[attr-defined]
    keras.Model.train_on_batch = train_on_batch
