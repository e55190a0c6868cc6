"""BatchResizer: batches that follow each worker's speed and memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from hps_keras.batches.shares import Resizing
from hps_keras.worker.headroom import Headroom, checked_reserve


class BatchResizer(keras.callbacks.Callback):
    """Gives each worker batches by its speed, so that all finish a round together, within what its memory holds.

    List it on every rank, with :class:`ParameterServer` and data from :class:`hps_keras.data.ElasticDataset`. The
    batches of a round of BSP always sum to the same number B, the `batch_size` of all workers together: the learning
    rate keeps its meaning, and a round equals one large batch. Speeds are measured in every step, so that a worker that
    gets slower gets less. In the asynchronous models nobody waits for a slow worker, so there batches stay equal but
    for the bounds by memory, and a push counts by its samples.

    Args:
        mode: What happens when a worker's memory does not hold its share. ``"cap"``: the others take more; where all
            together cannot hold B, that is an error. ``"accumulate"``: it trains its share in pieces and sums their
            gradients.
        shares: ``"auto"``: by speed in BSP only; ``"always"``; ``"never"``: bounds by memory only.
        reserve: Memory that batches must leave free: a share (below 1) of what the process may use, or bytes.
        dead_band: Sizes stay as they are while none would change by more than this share of itself.
        settle: Steps of each worker before sizes move for the first time, and between two moves.

    Attributes:
        options: The same, as the server gets them.
        limit: Most samples in a batch that this worker has memory for; 0 while that is not known.

    Raises:
        ConfigurationError: An argument is out of its range. In `fit`: the workers' memory cannot hold B samples, or a
            single one.

    Example:
        >>> resizer = hps.callbacks.BatchResizer(mode="accumulate")   # doctest: +SKIP
        >>> model.fit(data, callbacks=[hps.callbacks.ParameterServer(), resizer])   # doctest: +SKIP
    """

    def __init__(
        self,
        mode: str = "cap",
        shares: str = "auto",
        reserve: float | int = 0.1,
        dead_band: float = 0.05,
        settle: int = 5,
    ) -> None:
        super().__init__()
        self.options = Resizing(mode=mode, shares=shares, dead_band=dead_band, settle=settle)
        self.reserve = checked_reserve(reserve)
        self._headroom: Headroom | None = None

    @property
    def limit(self) -> int:
        """Most samples in a batch that this worker has memory for; 0 while that is not known."""
        return self._headroom.limit if self._headroom else 0

    def headroom(self, model: Any, sharers: Mapping[str, int]) -> Headroom:
        """Begins to measure what a model's batches need.

        Args:
            model: The model.
            sharers: How many workers take from each pool of memory on this machine.
        """
        self._headroom = Headroom(model, reserve=self.reserve, sharers=sharers)
        return self._headroom
