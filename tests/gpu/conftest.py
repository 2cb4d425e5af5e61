"""The tests of this folder need a GPU, and nothing else that the other tests do not have."""

import pytest
import torch


@pytest.fixture(autouse=True)
def cuda() -> None:
    """Skips where there is no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
