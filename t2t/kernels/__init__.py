"""One façade over the kernels: models call these names and never ask which implementation answers."""

from t2t.kernels.reference import (
    IGNORE,
    additive,
    attention,
    dropout,
    linear_cross_entropy,
    relative_bias,
    rms_norm,
    segment_mask,
)

__all__ = [
    "IGNORE",
    "additive",
    "attention",
    "dropout",
    "linear_cross_entropy",
    "relative_bias",
    "rms_norm",
    "segment_mask",
]
