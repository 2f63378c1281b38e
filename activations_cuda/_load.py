"""Loads the binding that was compiled for this torch, which registers the ops."""

import ctypes
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


def _interface(torch_version: str) -> str:
    """What a module is built for: all patch releases of a minor version, or one development build alone."""
    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\.post\d+)?(\+.*)?", torch_version)
    return release[1] if release else torch_version


def find_binding(running_torch: str, running_cuda: str | None, running_rocm: str | None = None) -> str:
    """The folder of the module for this torch minor version.

    It serves all builds of that torch, for the CPU and for CUDA. With kernels for CUDA it serves none of another CUDA major
    version, whose driver may be too old for them, nor any for ROCm, whose GPUs also go by the name of cuda.

    Raises:
        ImportError: There is none.
    """
    same_cuda = not running_cuda or not _build.cuda or _build.cuda.split(".")[0] == running_cuda.split(".")[0]
    same_gpus = same_cuda and not (_build.cuda and running_rocm)
    for folder, built_torch in _build.torches.items():
        if same_gpus and _interface(built_torch) == _interface(running_torch):
            return folder
    gpus = f" with CUDA {running_cuda}" if running_cuda else f" with ROCm {running_rocm}" if running_rocm else ""
    running = f"torch {running_torch}{gpus}"
    raise ImportError(
        f"activations_cuda {version} was built for torch {', '.join(_build.torches.values())}"
        f"{f' and CUDA {_build.cuda}' if _build.cuda else ''}, but {running} is installed. Build it for this torch: {FIX}"
    )


def check_gpus() -> None:
    """Warn where a build without CUDA meets a GPU, which setup.py can't say aloud: pip hides what it prints."""
    if _build.cuda is None and torch.version.cuda is not None and torch.cuda.device_count() > 0:
        warnings.warn(
            f"activations_cuda {version} was built without CUDA: on this machine's GPU it computes with PyTorch's ops, and "
            f"saves a byte per element. Build it with CUDA, which needs its toolkit: FORCE_CUDA=1 {FIX}",
            stacklevel=2,
        )


_folder = find_binding(torch.__version__, torch.version.cuda, torch.version.hip)
check_gpus()

if _build.cuda is not None and torch.version.cuda is not None:
    # For the binding, which isn't linked to it, to find.
    ctypes.CDLL(str(Path(__file__).with_name("libfastact_cuda.so")), mode=ctypes.RTLD_GLOBAL)

# Each is activations_cuda._C, in a folder of its own; first, or what an older build left in the package would be found.
activations_cuda.__path__.insert(0, str(Path(__file__).with_name(_folder)))
from activations_cuda import _C  # noqa: E402


def has_gpu() -> bool:
    """Whether there is a GPU, and kernels for one."""
    return _build.cuda is not None and torch.cuda.is_available()


def build_info() -> dict[str, Any]:
    """How the installed package was built.

    Returns:
        dict: ``version`` of this package and the git ``commit`` it was built from (None outside of a checkout); ``torch``, the
        version that the loaded binding was compiled against; ``cuda``, the version of the toolkit that compiled the kernels
        (None in a CPU build); ``archs``, the GPU architectures it holds code for, as in TORCH_CUDA_ARCH_LIST; ``compiler`` of
        the host code.
    """
    return {
        "version": version,
        "commit": _build.commit,
        "torch": _build.torches[_folder],
        "cuda": _build.cuda,
        "archs": list(_build.archs),
        "compiler": _C.compiler,
    }
