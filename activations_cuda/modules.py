"""The modules, each a subclass of its namesake in :mod:`torch.nn` that differs in what it computes with.

Arguments, attributes and printed form are its namesake's; formula, shapes, dtypes and errors those of its function.
"""

from torch import Tensor, nn

from activations_cuda import functional as F

__all__ = ["Hardshrink", "Hardsigmoid", "Hardtanh", "LeakyReLU", "ReLU", "ReLU6", "Softshrink", "Threshold"]


class ReLU(nn.ReLU):
    """:class:`torch.nn.ReLU`, keeping one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(input, self.inplace)


class ReLU6(nn.ReLU6):
    """:class:`torch.nn.ReLU6`, keeping one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu6(input, self.inplace)


class LeakyReLU(nn.LeakyReLU):
    """:class:`torch.nn.LeakyReLU`, keeping one bit per element. In place, the slope may be negative."""

    def forward(self, input: Tensor) -> Tensor:
        return F.leaky_relu(input, self.negative_slope, self.inplace)


class Hardtanh(nn.Hardtanh):
    """:class:`torch.nn.Hardtanh`, keeping one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.hardtanh(input, self.min_val, self.max_val, self.inplace)


class Hardsigmoid(nn.Hardsigmoid):
    """:class:`torch.nn.Hardsigmoid`, keeping one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.hardsigmoid(input, self.inplace)


class Hardshrink(nn.Hardshrink):
    """:class:`torch.nn.Hardshrink`, keeping one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.hardshrink(input, self.lambd)


class Softshrink(nn.Softshrink):
    """:class:`torch.nn.Softshrink`, keeping one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.softshrink(input, self.lambd)


class Threshold(nn.Threshold):
    """:class:`torch.nn.Threshold`, keeping one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        return F.threshold(input, self.threshold, self.value, self.inplace)
