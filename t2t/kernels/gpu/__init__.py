"""The kernels where a GPU gains by another way than the reference's."""

from t2t.kernels.gpu.spans import attention, attention_bias
from t2t.kernels.reference import (
    dropout,
    embedding,
    linear_cross_entropy,
    linear_dropout_add,
    relu_feed_forward,
    rms_norm,
)

__all__ = [
    "attention",
    "attention_bias",
    "dropout",
    "embedding",
    "linear_cross_entropy",
    "linear_dropout_add",
    "relu_feed_forward",
    "rms_norm",
]
