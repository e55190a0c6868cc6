"""The Keras callbacks of hps_keras, installed as `hps_keras.callbacks`; those of Horovod's names are among them."""

from hps_keras.callbacks.adaptive_quantization import AdaptiveQuantization
from hps_keras.callbacks.batch_resizer import BatchResizer
from hps_keras.callbacks.forced_sync import ForcedSync
from hps_keras.callbacks.horovod import BestModelCheckpoint, BroadcastGlobalVariablesCallback, MetricAverageCallback
from hps_keras.callbacks.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from hps_keras.callbacks.parameter_server import ParameterServer

__all__ = [
    "AdaptiveQuantization",
    "BatchResizer",
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "ForcedSync",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ParameterServer",
]
