"""What stands in for a model's train function while an exchange picks its gradients up, and while none does."""

from __future__ import annotations

from typing import Any

from hps_keras import backends
from hps_keras.errors import HpsError
from hps_keras.worker.exchange import Exchange


class Guard:
    """Stands in for a train function when nobody picks its gradients up."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, *arguments: Any) -> Any:
        """Refuses to train."""
        raise HpsError(
            "this model's optimizer was made by hps.DistributedOptimizer, but nothing exchanges its gradients here: "
            "give model.fit(..., callbacks=[...]) hps.callbacks.ParameterServer() or one of Horovod's callbacks, or "
            "train by train_on_batch, or in a loop of your own (hps.training)"
        )


class Exchanging(Guard):
    """Stands in for a train function in a loop: Keras's step, then the exchange."""

    def __init__(self, original: Any, exchange: Exchange, step: backends.Step) -> None:
        super().__init__(original)
        self._exchange, self._step = exchange, step

    def __call__(self, *arguments: Any) -> Any:
        """Trains on a batch."""
        try:
            return self._exchange.run(self._step, self.original, arguments)
        except Exception:  # which the script may catch: what the step has counted is no second step
            self._exchange.training.recover(self._step)
            raise


def unguarded(train_function: Any) -> Any:
    """Keras's own train function."""
    return train_function.original if isinstance(train_function, Guard) else train_function
