"""Loads the binding that was compiled for this torch, which registers the ops."""

import re
import warnings
from pathlib import Path
from typing import Any

import torch

import activations_cuda

try:
    from activations_cuda import _build
except ImportError:
    raise ImportError(
        "this activations_cuda is a source tree that isn't built: leave its folder, or build it in place with "
        "pip install --no-build-isolation -e ."
    ) from None

version = _build.version

FIX = "pip install --no-build-isolation --force-reinstall --no-deps . in its source tree"


def _describe(torch_version: str, cuda: str | None) -> str:
    return f"torch {torch_version} ({f'CUDA {cuda}' if cuda else 'CPU'})"


def _interface(torch_version: str) -> str:
    """What a module is built for: all patch releases of a minor version, or one development build alone."""
    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\.post\d+)?(\+.*)?", torch_version)
    return release[1] if release else torch_version


def find_binding(running_torch: str, running_cuda: str | None) -> str:
    """The folder of the module for this torch minor version and CUDA major version.

    A build without any binding for CUDA also serves CUDA builds of torch.

    Raises:
        ImportError: There is none.
    """
    built_with_cuda = any(cuda for _, cuda in _build.bindings.values())
    for folder, (built_torch, built_cuda) in _build.bindings.items():
        same_torch = _interface(built_torch) == _interface(running_torch)
        same_cuda = (built_cuda or "").split(".")[0] == (running_cuda or "").split(".")[0]
        if same_torch and (same_cuda or not built_with_cuda):
            return folder
    built = ", ".join(_describe(*binding) for binding in _build.bindings.values())
    raise ImportError(
        f"activations_cuda {version} was built for {built}, but {_describe(running_torch, running_cuda)} is installed. Build "
        f"it for this torch: {FIX}"
    )


def check_gpus(built_cuda: str | None) -> None:
    """Warn where a build without CUDA meets a GPU, which setup.py can't say aloud: pip hides what it prints."""
    if built_cuda is None and torch.version.cuda is not None and torch.cuda.device_count() > 0:
        warnings.warn(
            f"activations_cuda {version} was built without CUDA: on this machine's GPU it computes with PyTorch's ops, and "
            f"saves a byte per element. Build it with CUDA, which needs its toolkit: FORCE_CUDA=1 {FIX}",
            stacklevel=2,
        )


_folder = find_binding(torch.__version__, torch.version.cuda)
built_torch, built_cuda = _build.bindings[_folder]
check_gpus(built_cuda)

# Each is activations_cuda._C, in a folder of its own; first, or what an older build left in the package would be found.
activations_cuda.__path__.insert(0, str(Path(__file__).with_name(_folder)))
from activations_cuda import _C  # noqa: E402


def has_gpu() -> bool:
    """Whether there is a GPU and the binding has kernels for one."""
    return built_cuda is not None and torch.cuda.is_available()


def build_info() -> dict[str, Any]:
    """How the installed package was built.

    Returns:
        dict: ``version`` of this package and the git ``commit`` it was built from (None outside of a checkout); ``torch``, the
        version that the loaded binding was compiled against; ``cuda`` version of that torch and ``cuda_toolkit`` that compiled
        the kernels (both None in a CPU build); ``archs``, the GPU architectures it holds code for, as in TORCH_CUDA_ARCH_LIST;
        ``compiler`` of the host code.
    """
    return {
        "version": version,
        "commit": _build.commit,
        "torch": built_torch,
        "cuda": built_cuda,
        "cuda_toolkit": _C.cuda_toolkit,
        "archs": list(_build.archs) if built_cuda else [],
        "compiler": _C.compiler,
    }
