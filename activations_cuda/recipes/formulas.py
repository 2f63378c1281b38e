"""Formulas for which PyTorch has no function with a rule's signature, and what is known of every formula.

Those of normalizations are in :mod:`.norms`.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from activations_cuda import _C
from activations_cuda.recipes import norms
from activations_cuda.recipes.programs import Instruction, argument, instruction, norm, operand

aten = torch.ops.aten


def cat(*tensors_and_dim):
    return _C.recipes.join(tensors_and_dim[:-1], tensors_and_dim[-1])


def stack(*tensors_and_dim):
    return torch.stack(tensors_and_dim[:-1], tensors_and_dim[-1])


def same(input: Tensor) -> Tensor:
    return input


def dropout(input, mask, scale, scale_on_cpu):
    return input.mul(mask).mul_(scale_on_cpu if input.device.type == "cpu" else scale)


@functools.lru_cache(maxsize=1024)
def scales_of_dropout(p, dtype):
    """As GPUs compute it, and as the CPU does, which rounds it to the dtype."""
    if p == 1:
        return None  # gives zeros, which need no recipe
    exact = 1 / (1 - p)
    scale = exact if dtype == torch.float64 else _float32(1 / _float32(1 - p))
    return scale, torch.tensor(exact, dtype=dtype).item()


def where(input, other, condition):
    return torch.where(condition, input, other)


def index_select(input, index, dim):
    return torch.index_select(input, dim, index)


def index(input, *indices):
    return aten.index(input, indices)


def expanded(input, sizes, shape):
    return input.expand(sizes).reshape(shape)


def gather(input, index, dim):
    return torch.gather(input, dim, index)


def threshold(input, value, bound):
    return torch.where(is_beyond(input, bound), value, input)


def is_beyond(input, bound):
    """As PyTorch's op compares them: half types in float32 on the CPU."""
    return (input.float() if input.device.type == "cpu" and input.element_size() == 2 else input) <= bound


def padded(input, border, pad):
    output = torch.constant_pad_nd(input, pad)
    for side, width in enumerate(pad):  # from the last dimension on
        dim = output.dim() - 1 - side // 2
        output.narrow(dim, (output.size(dim) - width) * (side % 2), width).fill_(border)
    return output


def add(self, other, alpha):
    return torch.add(self, other, alpha=alpha)


def sub(self, other, alpha):
    return torch.sub(self, other, alpha=alpha)


def rsub(self, other, alpha):
    return torch.rsub(self, other, alpha=alpha)


def add_(self, other, alpha):
    return self.add_(other, alpha=alpha)


def sub_(self, other, alpha):
    return self.sub_(other, alpha=alpha)


def addcmul(self, tensor1, tensor2, value):
    return torch.addcmul(self, tensor1, tensor2, value=value)


def multiply_add(input, factor, addend):
    return torch.addcmul(addend, factor, input)


def addcdiv(self, tensor1, tensor2, value):
    return torch.addcdiv(self, tensor1, tensor2, value=value)


def max_pool2d(input, indices):
    return _gathered(input.flatten(-2), indices.flatten(-2), indices)


def max_pool3d(input, indices):
    return _gathered(input.flatten(-3), indices.flatten(-3), indices)


def _gathered(planes, indices, like):
    """The elements that were the greatest: it is for their indices that backward saves them."""
    values = torch.empty_like(like, dtype=planes.dtype)
    return torch.gather(planes, -1, indices, out=values.view(indices.shape)).view(like.shape)


def adaptive_avg_pool2d(input, shape):
    return aten._adaptive_avg_pool2d(input, shape[-2:])


def adaptive_avg_pool3d(input, shape):
    return aten._adaptive_avg_pool3d(input, shape[-3:])


@functools.lru_cache(maxsize=1024)
def _is_multiple(size, output):
    """Whether each element is repeated as often. PyTorch scales indices in float32, which may round whole ones down."""
    factor, scale = output // size, _float32(size / output)
    is_whole = output == factor * size < 2**24
    return is_whole and all(int(_float32(i * factor * scale)) == i for i in range(size))


def _float32(number):
    return ctypes.c_float(number).value


def is_by_whole_numbers(sizes, output_size, scales):
    """Whether nearest upsampling repeats each element as often."""
    given = zip(sizes, output_size, scales, strict=True)
    return all(_is_multiple(size, output) and scale in (None, output / size) for size, output, scale in given)


def one_of_each(tensor, sizes):
    """The tensor of these sizes from which nearest upsampling made another."""
    part = tensor[(..., *(slice(None, None, output // size) for output, size in zip(tensor.shape[2:], sizes, strict=True)))]
    is_channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return part.contiguous(memory_format=torch.channels_last if is_channels_last else torch.contiguous_format)


def upsample_nearest(input, output_size, *scales):
    return _upsampled((aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d), input, output_size, scales)


def upsample_nearest_exact(input, output_size, *scales):
    ops = aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d
    return _upsampled(ops, input, output_size, scales)


def _upsampled(ops, input, output_size, scales):
    """By whole numbers each element is repeated, which a copy does faster than PyTorch's kernels for channels-last."""
    sizes = input.shape[2:]
    if not is_by_whole_numbers(sizes, output_size, scales):
        return ops[len(sizes) - 1](input, output_size, *scales)
    is_channels_last = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)
    repeated, first = (input.movedim(1, -1), 1) if is_channels_last else (input, 2)
    shape = [*repeated.shape]
    shape[first : first + len(sizes)] = output_size
    for dim, (size, output) in reversed([*enumerate(zip(sizes, output_size, strict=True), first)]):
        repeated = repeated.unsqueeze(dim + 1)
        repeated = repeated.expand([output // size if i == dim + 1 else -1 for i in range(repeated.dim())])
    copy = _C.recipes.contiguous(repeated).view(shape)
    return copy.movedim(-1, 1) if is_channels_last else copy


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a formula.

    Attributes:
        in_place: the same, written to its first operand, for one that is a temporary.
        program: its instructions, from its first operand on, if this package's kernel can compute it.
        is_tabulated: whether it is a function of one number: half types have so few that a table holds them all.
        is_movement: whether its elements are its operands'. So a float32 tensor that came from a half type can be moved before
            it is cast.
        is_view: whether it mostly copies nothing.
        varies: whether on the CPU its bits differ between vectors and single elements, and so with the layout, or between the
            formula and its program; or a function of its arguments that says so.
    """

    in_place: Callable[..., Tensor] | None = None
    program: tuple[Instruction, ...] | None = None
    is_tabulated: bool = False
    is_movement: bool = False
    is_view: bool = False
    varies: bool | Callable[..., bool] = False


def is_another_on_cpu(scale, scale_on_cpu):
    return scale != scale_on_cpu


def is_scaled(alpha):
    return alpha != 1


def is_no_product(exponent=None):
    """Squares and cubes are products, in vectors and beyond them."""
    return exponent not in (2, 3)


RELU = (instruction("clamp", 0.0, float("inf")),)
HARDTANH = (instruction("clamp", argument(0), argument(1)),)
MOVEMENT = Facts(is_movement=True)
VIEW = Facts(is_movement=True, is_view=True)
TABULATED = Facts(is_tabulated=True)
VARIES = Facts(varies=True)
TABULATED_VARIES = Facts(is_tabulated=True, varies=True)

FORMULAS: dict[Callable[..., Tensor], Facts] = {
    # activations
    torch.relu: Facts(in_place=torch.relu_, program=RELU),
    _C.relu: Facts(in_place=_C.relu_, program=RELU),
    _C.relu6: Facts(in_place=_C.relu6_, program=(instruction("clamp", 0.0, 6.0),)),
    F.hardtanh: Facts(in_place=F.hardtanh_, program=HARDTANH),
    _C.hardtanh: Facts(in_place=_C.hardtanh_, program=HARDTANH),
    F.leaky_relu: Facts(in_place=F.leaky_relu_, is_tabulated=True),
    _C.leaky_relu: TABULATED,
    aten.elu: TABULATED_VARIES,
    F.celu: TABULATED_VARIES,
    _C.gelu: TABULATED_VARIES,
    _C.silu: Facts(in_place=_C.silu_, program=(instruction("silu"),), is_tabulated=True, varies=True),
    _C.mish: Facts(in_place=_C.mish_, is_tabulated=True, varies=True),
    _C.hardswish: Facts(in_place=_C.hardswish_, is_tabulated=True),
    F.hardsigmoid: TABULATED,
    _C.hardsigmoid: TABULATED,
    torch.sigmoid: Facts(in_place=torch.sigmoid_, is_tabulated=True, varies=True),
    torch.tanh: Facts(in_place=torch.tanh_, program=(instruction("tanh"),), is_tabulated=True, varies=True),
    F.softplus: TABULATED_VARIES,
    F.logsigmoid: TABULATED,
    F.hardshrink: TABULATED,
    _C.hardshrink: TABULATED,
    F.softshrink: TABULATED_VARIES,  # the signs of its zeros
    _C.softshrink: TABULATED,
    _C.threshold: TABULATED,
    F.glu: VARIES,
    # normalizations
    norms.batch_norm_elementwise: Facts(program=norm("batch_norm", "channels", "channels", bias=0.0)),
    norms.batch_norm_scaled: Facts(program=norm("scaled_norm", "channels", "channels")),
    norms.batch_norm_affine: Facts(program=norm("affine_norm", "channels", "channels", bias=0.0)),
    norms.batch_norm_folded: Facts(program=norm("folded_norm", "channels", "channels")),
    norms.group_norm_folded: Facts(program=norm("folded_norm", "groups", "channels", bias=0.0)),
    norms.group_norm_affine: Facts(program=norm("affine_norm", "groups", "channels", bias=0.0)),
    norms.group_norm_centered: Facts(program=norm("centered_norm", "groups", "channels")),
    norms.layer_norm_centered: Facts(program=norm("centered_norm", "broadcast", "broadcast")),
    norms.layer_norm_centered_on_cpu: Facts(program=norm("centered_norm", "broadcast", "broadcast", bias=0.0)),
    norms.rms_norm_scaled: Facts(
        program=(instruction("multiply", operand(3)), instruction("multiply", operand(1, default=1.0))),
    ),
    # arithmetic
    add: Facts(in_place=add_, program=(instruction("add", operand(1), argument(0)),), varies=is_scaled),
    sub: Facts(in_place=sub_, program=(instruction("subtract", operand(1), argument(0)),), varies=is_scaled),
    rsub: Facts(varies=is_scaled),
    torch.mul: Facts(in_place=torch.Tensor.mul_, program=(instruction("multiply", operand(1)),)),
    multiply_add: Facts(program=(instruction("multiply_add", operand(1), operand(2)),), varies=True),
    torch.div: Facts(in_place=torch.Tensor.div_, program=(instruction("divide", operand(1)),)),
    torch.pow: Facts(program=(instruction("power", argument(0)),), is_tabulated=True, varies=is_no_product),
    torch.sqrt: TABULATED,
    torch.rsqrt: TABULATED_VARIES,
    torch.exp: TABULATED_VARIES,
    torch.exp2: VARIES,
    torch.expm1: VARIES,
    torch.log2: VARIES,
    torch.log10: VARIES,
    torch.logaddexp: VARIES,
    torch.erfc: VARIES,
    torch.sinh: VARIES,
    torch.cosh: VARIES,
    torch.asinh: VARIES,
    torch.atan: VARIES,
    torch.atan2: VARIES,
    torch.hypot: VARIES,
    torch.neg: Facts(in_place=torch.neg_, is_tabulated=True),
    torch.lerp: VARIES,
    dropout: Facts(
        program=(instruction("multiply", operand(1), rounded=True), instruction("multiply", argument(0))),
        varies=is_another_on_cpu,
    ),
    # casts and copies
    torch.Tensor.to: Facts(program=()),
    same: Facts(program=(), is_movement=True, is_view=True),
    cat: MOVEMENT,
    stack: MOVEMENT,
    torch.roll: MOVEMENT,
    torch.flip: MOVEMENT,
    torch.rot90: MOVEMENT,
    torch.Tensor.repeat: MOVEMENT,
    expanded: MOVEMENT,
    index: MOVEMENT,
    F.pixel_shuffle: MOVEMENT,
    F.pixel_unshuffle: MOVEMENT,
    torch.channel_shuffle: MOVEMENT,
    aten.im2col: MOVEMENT,
    aten.reflection_pad1d: MOVEMENT,
    aten.reflection_pad2d: MOVEMENT,
    aten.reflection_pad3d: MOVEMENT,
    aten.replication_pad1d: MOVEMENT,
    aten.replication_pad2d: MOVEMENT,
    aten.replication_pad3d: MOVEMENT,
    upsample_nearest: MOVEMENT,
    upsample_nearest_exact: MOVEMENT,
    # interpolation
    aten.upsample_linear1d: VARIES,
    aten.upsample_bilinear2d: VARIES,
    aten.upsample_bicubic2d: VARIES,
    aten.upsample_trilinear3d: VARIES,
    # views
    torch.reshape: VIEW,
    torch.Tensor.expand: VIEW,
    torch.transpose: VIEW,
    torch.t: VIEW,
    torch.permute: VIEW,
    torch.select: VIEW,
    aten.slice: VIEW,
}
