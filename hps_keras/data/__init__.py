"""Data of which each worker trains on a part: ElasticDataset, and shards of ordinary data.

:class:`ElasticDataset` lends one shuffled stream of samples to all workers, :func:`shard` gives each worker a part of
its own before training.
"""

from hps_keras.data.dataset import ElasticDataset
from hps_keras.data.sharding import fingerprint_of, shard

__all__ = ["ElasticDataset", "fingerprint_of", "shard"]
