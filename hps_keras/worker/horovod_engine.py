"""Averages by Horovod's own engine, ``hps.init(servers=0, collectives="horovod")``: NCCL where it was built with it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

from hps_keras import backends
from hps_keras.errors import ConfigurationError
from hps_keras.server.twins import checksum
from hps_keras.worker.averaging import Averaging
from hps_keras.worker.group import Group
from hps_keras.worker.link import Link

_REST = 1.0  # seconds between two looks at the time


class _Asked(NamedTuple):
    """What another thread does, as if it were a request of MPI."""

    future: Future[None]

    def Test(self) -> bool:
        """Whether it has ended; waits for it a little."""
        wait([self.future], timeout=_REST)
        return self.future.done()


class HorovodAveraging(Averaging):
    """Sums gradients as TensorFlow tensors, on the device where the step has left them.

    Args:
        link: The line to the coordinator, and the cluster.

    Raises:
        ConfigurationError: Keras does not run on TensorFlow.
    """

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        if backends.name() != "tensorflow":
            raise ConfigurationError(
                f"collectives='horovod' (HPS_COLLECTIVES) with KERAS_BACKEND={backends.name()!r}: Horovod's engine "
                "takes TensorFlow's tensors here; use collectives='mpi', or Keras on TensorFlow"
            )
        import horovod.tensorflow as hvd

        self._hvd = hvd
        # The engine blocks who asks it, and who waits must be able to say so.
        self._engine = ThreadPoolExecutor(1, "hps-horovod")
        self._tensors: list[Any] | None = None  # of the step whose push is next; None: they are in the group's buffer

    def gradients(self, step: backends.Step, group: Group, present: Sequence[int]) -> None:
        """Keeps the gradients that a step has left behind; those of a batch in pieces are in the buffer already."""
        if group.pieces.samples:
            super().gradients(step, group, present)
        else:
            having: Any = step
            self._tensors = having.tensors(group.optimizer, group.variables, present)

    def _checksum(self, group: Group) -> int:
        if self._tensors is None:
            return super()._checksum(group)
        sums = 0
        for tensor in self._tensors:
            sums = checksum(np.ascontiguousarray(tensor).reshape(-1), sums)
        return sums | 1 << 32

    def _sum(self, group: Group, factor: float) -> None:
        import tensorflow as tf

        tensors, self._tensors = self._tensors, None
        if tensors is None:
            if not factor:
                group.out.fill(0)
            tensors = [tf.convert_to_tensor(view) for view in group.out_views]
        if factor not in (0, 1):
            tensors = [tensor * tf.constant(factor, tensor.dtype) for tensor in tensors]

        def reduce() -> None:
            sums = self._hvd.grouped_allreduce(tensors, op=self._hvd.Sum, name=f"hps.optimizer.{group.index}")
            for view, total in zip(group.out_views, sums):
                view[...] = total

        asked = _Asked(self._engine.submit(reduce))
        self._await(iter([asked]))
        asked.future.result()  # raises what it has raised
