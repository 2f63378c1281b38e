"""PyTorch's piecewise-linear activations, exact to the bit, keeping one bit per element for the backward pass."""

from activations_cuda import _load
from activations_cuda._load import build_info
from activations_cuda.functional import hardsigmoid, hardtanh

__version__ = _load.version

__all__ = ["build_info", "hardsigmoid", "hardtanh"]
