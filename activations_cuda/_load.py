"""Loads the compiled library, which registers the ops, after making sure that it was built for this torch."""

import re
import warnings
from typing import Any

import torch

try:
    from activations_cuda import _build
except ImportError:
    raise ImportError(
        "this activations_cuda is a source tree that isn't built: leave its folder, or build it in place with "
        "pip install --no-build-isolation -e ."
    ) from None

version = _build.version

MEND = "pip install --no-build-isolation --force-reinstall --no-deps . in its source tree"


def _describe(torch_version, cuda):
    return f"torch {torch_version} ({f'CUDA {cuda}' if cuda else 'CPU'})"


def _interface(torch_version):
    """What a library is built for: all patch releases of a minor version, or one development build alone."""
    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\.post\d+)?(\+.*)?", torch_version)
    return release[1] if release else torch_version


def check_torch(running_torch, running_cuda):
    """Raise ImportError unless a library built for this torch minor version and CUDA major version serves the running one."""
    same_torch = _interface(running_torch) == _interface(_build.torch)
    same_cuda = _build.cuda is None or (running_cuda or "").split(".")[0] == _build.cuda.split(".")[0]
    if not (same_torch and same_cuda):
        raise ImportError(
            f"activations_cuda {version} was built for {_describe(_build.torch, _build.cuda)}, but "
            f"{_describe(running_torch, running_cuda)} is installed. Build it for this torch: {MEND}"
        )


def check_gpus():
    """Warn where a build without CUDA meets a GPU, which setup.py can't say aloud: pip hides what it prints."""
    if _build.cuda is None and torch.version.cuda is not None and torch.cuda.device_count() > 0:
        warnings.warn(
            f"activations_cuda {version} was built without CUDA: on this machine's GPU it computes by PyTorch's ops, and keeps "
            f"a byte per element. Build it with CUDA, which needs its toolkit: FORCE_CUDA=1 {MEND}",
            stacklevel=2,
        )


check_torch(torch.__version__, torch.version.cuda)
check_gpus()

from activations_cuda import _C  # noqa: E402


def build_info() -> dict[str, Any]:
    """How the installed package was built.

    Returns:
        dict: ``version`` of this package and the git ``commit`` it was built from (None outside of a checkout); ``torch``
        version it was compiled against; ``cuda`` version of that torch and ``cuda_toolkit`` that compiled the kernels (both
        None in a CPU build); ``archs``, the GPU architectures it holds code for, as in TORCH_CUDA_ARCH_LIST; ``compiler`` of
        the host code.
    """
    return {
        "version": version,
        "commit": _build.commit,
        "torch": _build.torch,
        "cuda": _build.cuda,
        "cuda_toolkit": _C.cuda_toolkit,
        "archs": list(_build.archs),
        "compiler": _C.compiler,
    }
