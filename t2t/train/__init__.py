"""Training. The package itself is the function `t2t.train.run.train`: ``t2t.train(config)``."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See `t2t.train.run.train`."""
        from t2t.train.run import train

        return train(*args, **kwargs)


# ``t2t.train`` names both this package and the function that users call; a callable module is both.
sys.modules[__name__].__class__ = _Callable
