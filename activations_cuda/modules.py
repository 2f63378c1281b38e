"""The modules, each a subclass of its namesake in :mod:`torch.nn` that differs in what it computes with.

Arguments and attributes are its namesake's; formula, shapes, dtypes and errors those of its function. Printed, each names this
package.
"""

from torch import Tensor, nn

from activations_cuda import functional as F

__all__ = [
    "GELU",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LeakyReLU",
    "Mish",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Softshrink",
    "Threshold",
]


class Activation(nn.Module):
    """What they have in common: how they print, and what they say to TorchScript."""

    def _get_name(self):
        return f"activations_cuda.{type(self).__name__}"

    def __prepare_scriptable__(self):
        raise RuntimeError(
            f"torch.jit.script: expected PyTorch's modules, got {self._get_name()}: call activations_cuda.revert(model) first"
        )


class ReLU(Activation, nn.ReLU):
    """:class:`torch.nn.ReLU`, saving one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(input, self.inplace)


class ReLU6(Activation, nn.ReLU6):
    """:class:`torch.nn.ReLU6`, saving one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        if F.is_exporting():  # as torch.nn.ReLU6
            return F.hardtanh(input, self.min_val, self.max_val, self.inplace)
        return F.relu6(input, self.inplace)


class LeakyReLU(Activation, nn.LeakyReLU):
    """:class:`torch.nn.LeakyReLU`, saving one bit per element. In place, the slope may be negative."""

    def forward(self, input: Tensor) -> Tensor:
        return F.leaky_relu(input, self.negative_slope, self.inplace)


class Hardtanh(Activation, nn.Hardtanh):
    """:class:`torch.nn.Hardtanh`, saving one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.hardtanh(input, self.min_val, self.max_val, self.inplace)


class Hardsigmoid(Activation, nn.Hardsigmoid):
    """:class:`torch.nn.Hardsigmoid`, saving one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.hardsigmoid(input, self.inplace)


class Hardshrink(Activation, nn.Hardshrink):
    """:class:`torch.nn.Hardshrink`, saving one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.hardshrink(input, self.lambd)


class Softshrink(Activation, nn.Softshrink):
    """:class:`torch.nn.Softshrink`, saving one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.softshrink(input, self.lambd)


class Threshold(Activation, nn.Threshold):
    """:class:`torch.nn.Threshold`, saving one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.threshold(input, self.threshold, self.value, self.inplace)


class GELU(Activation, nn.GELU):
    """:class:`torch.nn.GELU`, in bfloat16 and float16 saving its output and a few bits per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, self.approximate)


class SiLU(Activation, nn.SiLU):
    """:class:`torch.nn.SiLU`, in bfloat16 and float16 saving its output and a few bits per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(input, self.inplace)


class Hardswish(Activation, nn.Hardswish):
    """:class:`torch.nn.Hardswish`, in bfloat16 and float16 saving its output and a few bits per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.hardswish(input, self.inplace)


class Mish(Activation, nn.Mish):
    """:class:`torch.nn.Mish`, in bfloat16 and float16 saving its output and a few bits per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.mish(input, self.inplace)
