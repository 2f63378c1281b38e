"""The rules: how an op's output follows from its operands, by the name of the op's node in autograd's graph.

A rule gives a formula, its operands and its arguments: the output is formula(*operands, *arguments). Operands are values or
numbers. Most rules are data, which :func:`op` makes; any other is a function of a :class:`Step`. Where the formula may be one
of several, its place has ``Candidates``; none is taken on trust (:mod:`.verification`).

To add one, find the node's name (``tensor.grad_fn.name()``) and what it saves (``dir(tensor.grad_fn)``, ``_saved_...``). A
formula must repeat its op to the bit, so no matrix products, convolutions, random numbers, or sums in any order.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from activations_cuda import _C
from activations_cuda.recipes import formulas, norms
from activations_cuda.recipes.step import DTYPE, NUMBER, OUTPUT_NR, SHAPE, OpRule, Result, Step, Underivable

aten = torch.ops.aten


def op(formula: Callable[..., Tensor], *arguments: str, operands: tuple[str | None, ...] = ("self",)) -> OpRule:
    """The rule of an op by the names under which its node saves things: operands (None: it doesn't), then arguments."""
    return OpRule(formula, operands, arguments)


def unsaved(formula: Callable[..., Tensor], *arguments: str, operands: int = 1) -> OpRule:
    """The rule of an op whose node saves none of its operands."""
    return op(formula, *arguments, operands=(None,) * operands)


def binary(formula: Callable[..., Tensor], *arguments: str) -> OpRule:
    return op(formula, *arguments, operands=("self", "other"))


def by_scalar(formula: Callable[..., Tensor]) -> Callable[[Step], Result]:
    """The rule of a binary op by its overload for a number, which in place may round that to the tensor's dtype."""

    def rule(step):
        if step.tensor is None or step.tensor._version > 0:
            raise Underivable
        return formula, (step.operand(0), *step.arguments("other")), ()

    return rule


def one_of(formula: Callable[..., Any], *arguments: str) -> OpRule:
    """The rule of each output of an op that has several."""

    def output(input, output_nr, *arguments):
        return formula(input, *arguments)[output_nr]

    return unsaved(output, OUTPUT_NR, *arguments)


def _at_first(mask, tensor):
    """The element where the mask is first true, without waiting for the device."""
    index = mask.reshape(-1).to(torch.uint8).argmax()
    sizes = (1,) * (tensor.dim() - mask.dim()) + mask.shape
    part = tensor[tuple(slice(size) for size in sizes)]  # as much of it as the mask has elements
    return part.reshape(-1).index_select(0, index.view(1)).view(())


def masked_fill(step: Step) -> Result:
    """The node doesn't save the number, which the tensor has wherever the mask is true."""
    input, mask = step.operand(0), step.saved("mask")
    return torch.where, (mask, step.constant(_at_first, mask), input), ()


def threshold(step: Step) -> Result:
    input = step.operand(0, "self")
    (bound,) = step.arguments("threshold")

    def beyond(tensor_of_input, tensor):
        return _at_first(formulas.is_beyond(tensor_of_input, bound), tensor)

    return formulas.threshold, (input, step.constant(beyond, input)), (bound,)


def constant_pad(step: Step) -> Result:
    """The node doesn't save the number, which the tensor has at its border."""
    (pad,) = step.arguments("pad")
    if not any(pad):  # a copy
        return formulas.same, (step.operand(0),), ()
    if min(pad) < 0:
        raise Underivable
    side = next(i for i, width in enumerate(pad) if width)

    def border(tensor):
        corner = tensor.select(-1 - side // 2, -(side % 2))
        return corner[(slice(1),) * corner.dim()].reshape(()).clone()

    return formulas.padded, (step.operand(0), step.constant(border)), (pad,)


def rrelu(step: Step) -> Result:
    lower, upper, training = step.arguments("lower", "upper", "training")
    if not training:
        return F.leaky_relu, (step.operand(0, "self"),), ((lower + upper) / 2,)
    if step.node._input_metadata[step.output_nr].dtype.itemsize == 2:
        raise Underivable  # it multiplies before it rounds the noise to save it
    return torch.mul, (step.operand(0, "self"), step.saved("noise")), ()


def of_three(formula: Callable[..., Tensor]) -> Callable[[Step], Result]:
    """The rule of an op whose node saves each of the last two tensors only if the other needs a gradient."""

    def rule(step):
        operands = step.operand(0), step.operand(1, "tensor1"), step.operand(2, "tensor2")
        if None in operands:
            raise Underivable
        return formula, operands, step.arguments("value")

    return rule


def addcmul(step: Step) -> Result:
    formula, (addend, *factors), (value,) = of_three(formulas.addcmul)(step)
    if value != 1 or step.node._input_metadata[step.output_nr].dtype.is_complex:  # whose parts are summed in another order
        return formula, (addend, *factors), (value,)
    factor, input = sorted(factors, key=lambda each: math.prod(each.sizes))  # of which the larger one may be a recipe
    return formulas.multiply_add, (input, factor, addend), ()


def pooled(formula: Callable[..., Tensor], dims: int) -> Callable[[Step], Result]:
    """The rule of a maximum in planes of so many dimensions. Its indices are kept in fewer bytes even if there is no recipe."""

    def rule(step):
        indices, (node, output_nr) = step.saved("result1"), step.node.next_functions[0]
        plane = node._input_metadata[output_nr].shape[-dims:]
        step.downcast(indices, torch.uint16 if math.prod(plane) <= 2**16 else torch.int32)
        return formula, (step.operand(0, "self"), indices), ()

    return rule


def upsampled(formula: Callable[..., Tensor], *scales: str) -> OpRule:
    """The rule of nearest upsampling. If nobody has the input, it is read from the output, which isn't saved then."""

    def from_part(step):
        sizes, (output_size, *given) = step.node._saved_self_sym_sizes[2:], step.arguments("output_size", *scales)
        if not formulas.is_by_whole_numbers(sizes, output_size, given):
            raise Underivable
        _check_factor(math.prod(sizes), math.prod(output_size))
        return formula, (step.part(lambda tensor: formulas.one_of_each(tensor, sizes)),), (output_size, *given)

    return OpRule(formula, (None,), ("output_size", *scales), otherwise=from_part)


def _check_factor(elements, repeated):
    """In the backward pass both are in memory, so one repetition is saved only if there are many."""
    if elements * MIN_REPETITIONS > repeated:
        raise Underivable


def repeated(step: Step) -> Result:
    """If nobody has the input, one of its repetitions is saved."""
    sizes, (times,) = step.node._saved_self_sym_sizes, step.arguments("repeats")  # type: ignore[attr-defined]
    _check_factor(1, math.prod(times))
    first: tuple[Any, ...] = (*(0,) * (len(times) - len(sizes)), *map(slice, sizes))
    return torch.Tensor.repeat, (step.part(lambda tensor: tensor[first].contiguous()),), (times,)


def expanded(step: Step) -> Result:
    """If nobody has a tensor that was expanded and then copied, as grouped queries' keys and values are, a part of the copy is
    saved.
    """
    clone = step.node if step.node.name() == "CloneBackward0" else step.node.next_functions[0][0]
    expand: Any = clone and clone.next_functions[0][0]
    if step.tensor is None:
        raise Underivable
    sizes, before = (*expand._input_metadata[0].shape,), expand._saved_self_sym_sizes
    _check_factor(math.prod(before), math.prod(sizes))
    first = (*(slice(1),) * (len(sizes) - len(before)), *map(slice, before))
    part = step.part(lambda tensor: tensor.reshape(sizes)[first].contiguous())
    return formulas.expanded, (part,), (sizes, (*step.tensor.shape,))


def index(step: Step) -> Result:
    """By integers alone. Where a mask is an index, the output's sizes depend on values."""
    indices = step.saved("indices")
    if any(each is not None and (each.is_recipe or getattr(each.held, "dtype", None) is not torch.int64) for each in indices):
        raise Underivable
    return formulas.index, (step.operand(0), *indices), ()


MIN_REPETITIONS = 4  # in a net of three layers, two raise the peak of a step by 15%, and four by 7%
WINDOW = "kernel_size", "stride", "padding"
SCALES = "scales_d", "scales_h", "scales_w"
INTERPOLATED = "output_size", "align_corners"
SPLIT = one_of(torch.split, "split_size", "dim")

RULES: dict[str, OpRule | Callable[[Step], Result]] = {
    # activations
    "ReluBackward0": op(torch.relu),
    "HardtanhBackward0": op(F.hardtanh, "min_val", "max_val"),
    "LeakyReluBackward0": op(F.leaky_relu, "negative_slope"),
    "LeakyReluBackward1": unsaved(F.leaky_relu, "negative_slope"),  # in place, as the other activations with a 1
    "EluBackward0": op(aten.elu, "alpha", "scale", "input_scale"),
    "EluBackward1": unsaved(aten.elu, "alpha", "scale", "input_scale"),
    "CeluBackward0": op(F.celu, "alpha"),
    "CeluBackward1": unsaved(F.celu, "alpha"),
    "GeluBackward0": op(_C.gelu, "approximate"),  # this package's smooth ones: the same bits, and faster
    "SiluBackward0": op(_C.silu),
    "MishBackward0": op(_C.mish),
    "HardswishBackward0": op(_C.hardswish),
    "HardsigmoidBackward0": op(F.hardsigmoid),
    "SigmoidBackward0": op(torch.sigmoid),
    "TanhBackward0": op(torch.tanh),
    "SoftplusBackward0": op(F.softplus, "beta", "threshold"),
    "LogSigmoidBackward0": op(F.logsigmoid),
    "PreluKernelBackward0": op(torch._prelu_kernel, operands=("self", "weight")),
    "HardshrinkBackward0": op(F.hardshrink, "lambd"),
    "SoftshrinkBackward0": op(F.softshrink, "lambd"),
    "ThresholdBackward0": threshold,
    "ThresholdBackward1": threshold,
    "RreluWithNoiseBackward0": rrelu,
    "RreluWithNoiseBackward1": rrelu,
    "GluBackward0": op(F.glu, "dim"),
    # normalizations
    "NativeBatchNormBackward0": norms.batch_norm(torch.native_batch_norm, "eps", norms.NATIVE, norms.NATIVE_ON_CPU),
    "CudnnBatchNormBackward0": norms.batch_norm(torch.cudnn_batch_norm, "epsilon", norms.CUDNN),
    "NativeLayerNormBackward0": norms.LAYER_NORM,
    "NativeGroupNormBackward0": norms.GROUP_NORM,
    "FusedRmsNormBackward0": norms.rms_norm,
    # arithmetic
    "AddBackward0": op(formulas.add, "alpha", operands=(None, NUMBER)),
    "SubBackward0": op(formulas.sub, "alpha", operands=(None, NUMBER)),
    "RsubBackward0": op(formulas.rsub, "alpha", operands=(None, NUMBER)),
    "RsubBackward1": op(formulas.rsub, "alpha", operands=(None, NUMBER)),
    "MulBackward0": binary(torch.mul),
    "MulBackward1": by_scalar(torch.mul),
    "DivBackward0": binary(torch.div),
    "DivBackward1": by_scalar(torch.div),
    "PowBackward0": op(torch.pow, "exponent"),
    "PowBackward1": op(torch.pow, operands=("self", "exponent")),
    "SqrtBackward0": op(torch.sqrt),
    "RsqrtBackward0": op(torch.rsqrt),
    "ReciprocalBackward0": op(torch.reciprocal),
    "ExpBackward0": op(torch.exp),
    "Exp2Backward0": op(torch.exp2),
    "Expm1Backward0": op(torch.expm1),
    "LogBackward0": op(torch.log),
    "Log2Backward0": op(torch.log2),
    "Log10Backward0": op(torch.log10),
    "Log1PBackward0": op(torch.log1p),
    "LogaddexpBackward0": binary(torch.logaddexp),
    "ErfBackward0": op(torch.erf),
    "ErfcBackward0": op(torch.erfc),
    "SinBackward0": op(torch.sin),
    "CosBackward0": op(torch.cos),
    "SinhBackward0": op(torch.sinh),
    "CoshBackward0": op(torch.cosh),
    "AsinhBackward0": op(torch.asinh),
    "AtanBackward0": op(torch.atan),
    "Atan2Backward0": binary(torch.atan2),
    "HypotBackward0": binary(torch.hypot),
    "AbsBackward0": op(torch.abs),
    "NegBackward0": unsaved(torch.neg),
    "ClampBackward0": op(torch.clamp, operands=("self", "min", "max")),
    "ClampBackward1": op(torch.clamp, "min", "max"),
    "ClampMinBackward0": op(torch.clamp_min, "min"),
    "ClampMaxBackward0": op(torch.clamp_max, "max"),
    "MaximumBackward0": binary(torch.maximum),
    "MinimumBackward0": binary(torch.minimum),
    "LerpBackward0": unsaved(torch.lerp, "weight", operands=2),
    "LerpBackward1": op(torch.lerp, operands=("self", "end", "weight")),
    "AddcmulBackward0": addcmul,
    "AddcdivBackward0": of_three(formulas.addcdiv),
    "WhereBackward0": OpRule(formulas.where, (None, None), saved=("condition",)),
    "MaskedFillBackward0": masked_fill,
    "NativeDropoutBackward0": OpRule(
        formulas.dropout, (None,), ("p", DTYPE), saved=("result1",), convert=formulas.scales_of_dropout
    ),
    # casts and copies
    "ToCopyBackward0": unsaved(torch.Tensor.to, DTYPE),
    "CloneBackward0": OpRule(formulas.same, (None,), otherwise=expanded, behind=("ExpandBackward0",)),
    "AliasBackward0": unsaved(formulas.same),
    "CatBackward0": OpRule(formulas.cat, None, ("dim",)),
    "StackBackward0": OpRule(formulas.stack, None, ("dim",)),
    "ConstantPadNdBackward0": constant_pad,
    "ReflectionPad1DBackward0": op(aten.reflection_pad1d, "padding"),
    "ReflectionPad2DBackward0": op(aten.reflection_pad2d, "padding"),
    "ReflectionPad3DBackward0": op(aten.reflection_pad3d, "padding"),
    "ReplicationPad1DBackward0": op(aten.replication_pad1d, "padding"),
    "ReplicationPad2DBackward0": op(aten.replication_pad2d, "padding"),
    "ReplicationPad3DBackward0": op(aten.replication_pad3d, "padding"),
    "RollBackward0": unsaved(torch.roll, "shifts", "dims"),
    "FlipBackward0": unsaved(torch.flip, "dims"),
    "Rot90Backward0": unsaved(torch.rot90, "k", "dims"),
    "RepeatBackward0": OpRule(torch.Tensor.repeat, (None,), ("repeats",), otherwise=repeated),
    "TrilBackward0": unsaved(torch.tril, "diagonal"),
    "TriuBackward0": unsaved(torch.triu, "diagonal"),
    "PixelShuffleBackward0": unsaved(F.pixel_shuffle, "upscale_factor"),
    "PixelUnshuffleBackward0": unsaved(F.pixel_unshuffle, "downscale_factor"),
    "ChannelShuffleBackward0": unsaved(torch.channel_shuffle, "groups"),
    "Im2ColBackward0": unsaved(aten.im2col, "kernel_size", "dilation", "padding", "stride"),
    "IndexSelectBackward0": OpRule(formulas.index_select, (None,), ("dim",), saved=("index",)),
    "IndexBackward0": index,
    "UnsafeIndexBackward0": index,
    "GatherBackward0": OpRule(formulas.gather, ("self",), ("dim",), saved=("index",)),
    "EmbeddingBackward0": OpRule(torch.embedding, (None,), saved=("indices",)),
    "UpsampleNearest1DBackward0": upsampled(formulas.upsample_nearest, "scales"),
    "UpsampleNearest2DBackward0": upsampled(formulas.upsample_nearest, *SCALES[1:]),
    "UpsampleNearest3DBackward0": upsampled(formulas.upsample_nearest, *SCALES),
    "UpsampleNearestExact1DBackward0": upsampled(formulas.upsample_nearest_exact, "scales"),
    "UpsampleNearestExact2DBackward0": upsampled(formulas.upsample_nearest_exact, *SCALES[1:]),
    "UpsampleNearestExact3DBackward0": upsampled(formulas.upsample_nearest_exact, *SCALES),
    "UpsampleLinear1DBackward0": unsaved(aten.upsample_linear1d, *INTERPOLATED, "scales"),
    "UpsampleBilinear2DBackward0": unsaved(aten.upsample_bilinear2d, *INTERPOLATED, *SCALES[1:]),
    "UpsampleBicubic2DBackward0": unsaved(aten.upsample_bicubic2d, *INTERPOLATED, *SCALES[1:]),
    "UpsampleTrilinear3DBackward0": unsaved(aten.upsample_trilinear3d, *INTERPOLATED, *SCALES),
    "AvgPool2DBackward0": op(aten.avg_pool2d, *WINDOW, "ceil_mode", "count_include_pad", "divisor_override"),
    "AvgPool3DBackward0": op(aten.avg_pool3d, *WINDOW, "ceil_mode", "count_include_pad", "divisor_override"),
    "AdaptiveAvgPool2DBackward0": op(formulas.adaptive_avg_pool2d, SHAPE),
    "AdaptiveAvgPool3DBackward0": op(formulas.adaptive_avg_pool3d, SHAPE),
    "MaxPool2DWithIndicesBackward0": pooled(formulas.max_pool2d, dims=2),
    "MaxPool3DWithIndicesBackward0": pooled(formulas.max_pool3d, dims=3),
    "AdaptiveMaxPool2DBackward0": pooled(formulas.max_pool2d, dims=2),
    "AdaptiveMaxPool3DBackward0": pooled(formulas.max_pool3d, dims=3),
    # views in the middle of a chain; one that is saved itself is its base and a geometry
    "ViewBackward0": unsaved(torch.reshape, SHAPE),
    "UnsafeViewBackward0": OpRule(
        torch.reshape, (None,), (SHAPE,), otherwise=expanded, behind=("CloneBackward0", "ExpandBackward0")
    ),
    "ReshapeAliasBackward0": unsaved(torch.reshape, SHAPE),
    "SqueezeBackward0": unsaved(torch.reshape, SHAPE),
    "SqueezeBackward1": unsaved(torch.reshape, SHAPE),
    "SqueezeBackward2": unsaved(torch.reshape, SHAPE),
    "UnsqueezeBackward0": unsaved(torch.reshape, SHAPE),
    "ExpandBackward0": unsaved(torch.Tensor.expand, SHAPE),
    "TransposeBackward0": unsaved(torch.transpose, "dim0", "dim1"),
    "TBackward0": unsaved(torch.t),
    "PermuteBackward0": unsaved(torch.permute, "dims"),
    "SelectBackward0": unsaved(torch.select, "dim", "index"),
    "SliceBackward0": unsaved(aten.slice, "dim", "start", "end", "step"),
    "DiagonalBackward0": unsaved(torch.diagonal, "offset", "dim1", "dim2"),
    "UnfoldBackward0": unsaved(aten.unfold, "dimension", "size", "step"),
    "SplitBackward0": SPLIT,
    "SplitWithSizesBackward0": one_of(torch.split_with_sizes, "split_sizes", "dim"),
    "UnbindBackward0": one_of(torch.unbind, "dim"),
}


def depthwise_convolution(step: Step) -> Result:
    weight, *arguments = step.operand(1, "weight"), *step.arguments(*CONVOLUTION_ARGUMENTS)
    if step.node._saved_transposed or step.node._saved_groups < 2 or weight.sizes[1] != 1:  # type: ignore[attr-defined]
        raise Underivable
    has_bias = any(step.node._saved_bias_sym_sizes_opt or ())  # type: ignore[attr-defined]
    bias = step.operand(2) if has_bias else None  # a frozen one can't be found
    return torch.convolution, (step.operand(0, "input"), weight, bias), tuple(arguments)


CONVOLUTION_ARGUMENTS = "stride", "padding", "dilation", "transposed", "output_padding", "groups"

# Those of recompute(convolutions=True).
RULES_WITH_CONVOLUTIONS = {**RULES, "ConvolutionBackward0": depthwise_convolution}
