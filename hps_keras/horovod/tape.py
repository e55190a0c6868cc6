"""Horovod's DistributedGradientTape: averaged gradients, for loops with an optimizer on each worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hps_keras import backends, cluster
from hps_keras.errors import ConfigurationError
from hps_keras.hints import say_once
from hps_keras.horovod.arguments import check_flags, check_predivision, check_without_effect
from hps_keras.horovod.autograph import as_written
from hps_keras.horovod.collectives import Average, allreduce
from hps_keras.horovod.process_sets import global_process_set
from hps_keras.horovod.reductions import ReduceOp
from hps_keras.quantization.compression import Compression, Compressor


@as_written
def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a ``tf.GradientTape`` whose ``gradient`` averages over the workers.

    The gradients of a call travel as one message, in float32, to the server and back; each worker then applies its own
    plain optimizer. All workers make the same calls; each counts alike, whatever the size of its batch. It works
    eagerly and in ``tf.function``, but not with ``jit_compile=True``.

    On a parameter server that has come so far in its script the call serves until the job ends, and the process then
    leaves with exit code 0: start with ``--dedicated-server``, and it does not run the script at all.

    Args:
        gradtape: The tape.
        device_dense: Without effect here.
        device_sparse: Without effect here.
        compression: ``hps.Compression.fp16`` sends 16 bits each way.
        sparse_as_dense: Gradients that are ``tf.IndexedSlices`` always travel, and come back, as dense tensors.
        op: ``hps.Average`` or ``hps.Sum``.
        gradient_predivide_factor: Divides gradients before the sum, and the mean is as without it.
        num_groups: Without effect: all travel together.
        groups: Without effect.
        process_set: The workers that take part.
        scale_local_gradients: Whether gradients of sources registered by ``register_local_source(source)``, which
            travel nowhere, are divided by the number of workers.

    Returns:
        A tape of the class of `gradtape`, which shares all that it has recorded. A source without a gradient on any
        worker has None; one that has none on some of them only gets the mean, theirs counted as zeros, and is refused
        in a ``tf.function``, which cannot return it.

    Raises:
        ConfigurationError: An argument cannot work, or Keras does not run on TensorFlow.
    """
    if backends.name() != "tensorflow":
        raise ConfigurationError(
            f"DistributedGradientTape needs TensorFlow, and Keras runs on {backends.name()}: wrap the optimizer in "
            "hps.DistributedOptimizer and write `with hps.training(model, optimizer) as loop:`"
        )
    import tensorflow as tf

    if not isinstance(gradtape, tf.GradientTape):
        raise ConfigurationError(f"gradtape={gradtape!r}: give a tf.GradientTape")
    here = cluster.current()
    if here.is_server:
        from hps_keras.server.dedicated import serve_to_the_end

        serve_to_the_end(here)
    check_without_effect(
        "DistributedGradientTape",
        device_dense=device_dense,
        device_sparse=device_sparse,
        num_groups=num_groups,
        groups=groups,
    )
    check_flags(sparse_as_dense=sparse_as_dense, scale_local_gradients=scale_local_gradients)
    average = Reducing(op, compression, gradient_predivide_factor, process_set)
    from hps_keras.backends.tensorflow_tape import distributed

    return distributed(gradtape, average, scale_local_gradients)


class Reducing:
    """What becomes of the gradients of one call, in one flat array.

    Args:
        op: As of :func:`DistributedGradientTape`; the others too.
        compression: Which width travels.
        factor: ``gradient_predivide_factor``.
        process_set: The workers that take part.

    Attributes:
        alone: Whether this process is the only one: nothing is to be done.
        workers: How many take part.
    """

    def __init__(self, op: Any, compression: Any, factor: Any, process_set: Any) -> None:
        chosen = ReduceOp.given(op)
        if chosen is None:
            raise ConfigurationError(f"op={op!r} of DistributedGradientTape: use hps.Average or hps.Sum")
        if not isinstance(compression, Compressor):
            raise ConfigurationError(f"compression={compression!r}: use hps.Compression.none or hps.Compression.fp16")
        check_predivision(factor, chosen is ReduceOp.Sum)
        self._op, self._factor, self._process_set = chosen, float(factor), process_set
        self._dtype = np.float16 if compression.bits <= 16 else np.float32
        self.alone = cluster.current().alone
        self.workers = len(getattr(process_set, "ranks", None) or cluster.current().workers)

    def __call__(self, flat: np.ndarray, absent: Sequence[str]) -> np.ndarray:
        """Averages an array over the workers.

        Args:
            flat: float32; it ends with a 1 for each source that has a gradient here and a 0 for each that has none.
            absent: The names of all sources, empty for those that may come back though they have no gradient here.

        Returns:
            The mean or the sum, float32.

        Raises:
            ConfigurationError: A source named has no gradient here, but on other workers.
        """
        label = "DistributedGradientTape"
        with np.errstate(over="ignore"):  # said below
            sent = flat.astype(self._dtype, copy=False)
        mean = np.asarray(
            allreduce(
                sent,
                label,
                prescale_factor=1 / self._factor,
                postscale_factor=self._factor,
                op=self._op,
                process_set=self._process_set,
            )
        )
        # Of what all get, the chief sees other workers' overflows too, and says so.
        if sent.dtype == np.float16 and np.any(np.isfinite(flat) & np.isinf(mean)):
            say_once(
                "DistributedGradientTape(compression=hps.Compression.fp16): gradients came back infinite, for values "
                "beyond 65,504 become infinite in float16; use hps.Compression.none, or scale the loss down"
            )
        found = mean[len(mean) - len(absent) :]
        lost = [name for name, here, there in zip(absent, flat[len(flat) - len(absent) :], found) if there and not here]
        if any(lost):
            raise ConfigurationError(
                f"sources {[name for name in lost if name]} have a gradient on some workers only, and a tf.function "
                "cannot return it where there was none: give tape.gradient(..., "
                "unconnected_gradients=tf.UnconnectedGradients.ZERO)"
            )
        return mean.astype(np.float32, copy=False)
