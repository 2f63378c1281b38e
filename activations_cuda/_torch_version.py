"""Where the releases of PyTorch differ, for the Python side; for the library's side that is csrc/torch_version.h."""

import torch

__all__ = ["is_dynamo_compiling", "is_exporting"]

try:
    from torch.compiler import is_dynamo_compiling
except ImportError:  # before 2.3
    from torch._dynamo import is_compiling as is_dynamo_compiling

# Not torch.compiler.is_exporting(), which torch 2.11's Dynamo takes for true whatever it compiles.
if hasattr(torch, "compiler") and hasattr(torch.compiler, "_is_exporting_flag"):  # since 2.7

    def is_exporting() -> bool:
        return torch.compiler._is_exporting_flag

else:

    def is_exporting() -> bool:
        return False
