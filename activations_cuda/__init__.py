"""PyTorch's piecewise-linear activations, exact to the bit, keeping one bit per element for the backward pass."""

from activations_cuda import _load
from activations_cuda._load import build_info
from activations_cuda.conversion import ConvertMode, convert, converted, revert
from activations_cuda.functional import hardshrink, hardsigmoid, hardtanh, leaky_relu, relu, relu6, softshrink, threshold
from activations_cuda.memory import MemoryReport, memory_report
from activations_cuda.modules import Hardshrink, Hardsigmoid, Hardtanh, LeakyReLU, ReLU, ReLU6, Softshrink, Threshold

__version__ = _load.version

__all__ = [
    "ConvertMode",
    "Hardshrink",
    "Hardsigmoid",
    "Hardtanh",
    "LeakyReLU",
    "MemoryReport",
    "ReLU",
    "ReLU6",
    "Softshrink",
    "Threshold",
    "build_info",
    "convert",
    "converted",
    "hardshrink",
    "hardsigmoid",
    "hardtanh",
    "leaky_relu",
    "memory_report",
    "relu",
    "relu6",
    "revert",
    "softshrink",
    "threshold",
]
