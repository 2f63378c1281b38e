"""Trains PyTorch models in less memory, with bit-identical results."""

from activations_cuda import _load, functional, modules
from activations_cuda._load import build_info
from activations_cuda.conversion import ConvertMode, convert, converted, revert
from activations_cuda.functional import *  # noqa: F403
from activations_cuda.memory import MemoryReport, memory_report
from activations_cuda.modules import *  # noqa: F403
from activations_cuda.recipes import recompute

__version__ = _load.version

__all__ = [
    "ConvertMode",
    "MemoryReport",
    "build_info",
    "convert",
    "converted",
    "memory_report",
    "recompute",
    "revert",
    *functional.__all__,
    *modules.__all__,
]
