"""Modules that call activations in all ways that people write, and the step that compares two of them."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import hardtanh

from family import assert_same_values

IMAGES = 4, 3, 32, 32


def helper(x):
    return hardtanh(x) * 2


def decorator(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def recursive(x, depth):
    return F.relu6(recursive(x, depth - 1)) if depth else x * 1


class Calls(nn.Module):
    """A convolution, a norm, whose output nobody else saves, and a function of them."""

    def __init__(self, function=None):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.function = function

    def forward(self, x):
        return self.act(self.norm(self.conv(x))).mean((2, 3))


class ByFunctional(Calls):
    def act(self, x):
        return F.relu6(x)


class ByLongName(Calls):
    def act(self, x):
        return torch.nn.functional.leaky_relu(x, negative_slope=0.2)


class ByNn(Calls):
    def act(self, x):
        return nn.functional.threshold(x, 0.1, 0.2)


class ByTorch(Calls):
    def act(self, x):
        return torch.hardshrink(x)


class ByName(Calls):
    def act(self, x):
        return hardtanh(x, 0.0, 1.0)


class InPlace(Calls):
    def act(self, x):
        return F.hardtanh_(x)


class ByHelper(Calls):
    def act(self, x):
        return helper(x)


class ByRecursion(Calls):
    def act(self, x):
        return recursive(x, 1)


class ByAttribute(Calls):
    def __init__(self):
        super().__init__(F.hardsigmoid)

    def act(self, x):
        return self.function(x)


class ByPartial(Calls):
    def __init__(self):
        super().__init__(partial(F.leaky_relu, negative_slope=0.3))

    def act(self, x):
        return self.function(x)


class ByStaticMethod(Calls):
    @staticmethod
    def act(x):
        return F.softshrink(x)


class ByClassMethod(Calls):
    @classmethod
    def act(cls, x):
        return F.relu6(x)


class ByClassAttribute(Calls):
    act = staticmethod(F.relu6)


class Decorated(Calls):
    @decorator
    def act(self, x):
        return F.relu6(x)


class Nested(Calls):
    def act(self, x):
        return sum((lambda t: F.relu6(t))(t) for t in (x, x + 1))


class ByDefault(Calls):
    def act(self, x, function=F.relu6):
        return function(x)


class BySuper(ByFunctional):
    def forward(self, x):
        return super().forward(x) + 1


class OfItsBase(ByFunctional):
    def act(self, x):
        return super().act(x)


class OfTwoBases(OfItsBase, BySuper):
    """Methods of three classes, each found by super()."""

    def act(self, x):
        return super().act(F.relu6(x) - 1)


class Directly(Calls):
    """Past the hooks of the module that it calls."""

    def __init__(self):
        super().__init__(nn.ReLU6())

    def act(self, x):
        return self.function.forward(x)


class WithOut(Calls):
    def act(self, x):
        with torch.no_grad():
            torch.threshold(x, 0, 0, out=torch.empty_like(x))
        return torch.threshold(x, 0.1, 0)


class OwnHardtanh(nn.Hardtanh):
    """Whose forward is torch.nn's."""


class CallsHardtanh(nn.Hardtanh):
    def forward(self, x):
        return super().forward(x) + 1


class OwnClass(Calls):
    def __init__(self):
        super().__init__()
        self.act = OwnHardtanh(-0.5, 0.5)


class OwnForward(Calls):
    def __init__(self):
        super().__init__()
        self.act = CallsHardtanh(-0.5, 0.5)


class Relu(Calls):
    """Nobody else saves its output."""

    def act(self, x):
        return F.relu(x, inplace=True) + 1


class ByBuiltinClassAttribute(Calls):
    act = torch.relu


class ByMethod(Calls):
    def act(self, x):
        return x.relu() + 1


class ByNameOfAttribute(Calls):
    """The name of a function is the name of an attribute too."""

    def act(self, x):
        self.hardtanh = 0
        return hardtanh(x) + self.hardtanh


def of_norm(norm, x):
    return F.relu6(norm(x))


class ByHelperOfModule(Calls):
    def forward(self, x):
        return of_norm(self.norm, self.conv(x)).mean((2, 3))


REACHED = [
    ByFunctional,
    ByLongName,
    ByNn,
    ByTorch,
    ByName,
    InPlace,
    ByHelper,
    ByRecursion,
    ByAttribute,
    ByPartial,
    ByStaticMethod,
    ByClassMethod,
    ByClassAttribute,
    ByBuiltinClassAttribute,
    ByHelperOfModule,
    ByMethod,
    ByNameOfAttribute,
    Decorated,
    Nested,
    ByDefault,
    BySuper,
    OfItsBase,
    OfTwoBases,
    Directly,
    WithOut,
    OwnClass,
    OwnForward,
    Relu,
]


def step(model, x):
    model.zero_grad()
    y = model(x)
    y.backward(torch.ones_like(y))
    return y.detach(), *(parameter.grad for parameter in model.parameters())


def assert_same_step(model, other, x):
    for actual, expected in zip(step(model, x), step(other, x), strict=True):
        assert_same_values(actual, expected)
