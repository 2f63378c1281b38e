"""Breaks the kernels or recompute() on purpose, one mutant at a time, and reports which of them the tests catch.

    python tests/mutations.py cpu
    python tests/mutations.py recompute
    python tests/mutations.py cuda    # one needs two GPUs to be caught

Each is built from a copy of the tree and meets the kernels' tests, or recompute's, until one fails; the first has nothing
broken, and must pass them all. Exits with 1 unless that and nothing else does.
"""

import argparse
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from trees import copy, install, run

TESTS = [  # the quick ones first
    f"test_{name}.py"
    for name in (
        "mask",
        "errors",
        "strides",
        "cuda",
        "exact",
        "inplace",
        "smooth",
        "programs",
        "norm_gradients",
        "layer_and_group_norm_gradients",
        "elementwise_gradients",
        "softmax_gradients",
        "cat_gradients",
        "from_half",
        "join",
        "first_use",
        "load",
        "guards",
        "exhaustive",
        "properties",
    )
]


RECOMPUTE_TESTS = [
    *sorted(file.name for file in Path(__file__).parent.glob("test_recompute_*.py")),
    "test_programs.py",
    "test_elementwise_gradients.py",
    "test_softmax_gradients.py",
    "test_cat_gradients.py",
    "test_from_half.py",
    "test_scalars.py",
    "test_rules.py",
    "test_partial.py",
    "test_distributed.py",
]


@dataclass(frozen=True)
class Mutant:
    what: str
    file: str
    code: str
    broken: str  # what stands there instead

    def __str__(self):
        return self.what


ACTIVATIONS = "csrc/bits/activations.h"
STRIDES = "csrc/binding/strides.h"
ARGUMENTS = "csrc/binding/bits/arguments.h"
AUTOGRAD = "csrc/binding/bits/autograd.cpp"
MASK = "csrc/mask.h"
LAUNCH = "csrc/binding/bits/launch.h"
DEVICES = "csrc/binding/devices.h"
CPU_BLOCK = "csrc/bits/cpu/block.h"
CPU_BACKWARD = "csrc/bits/cpu/backward.cpp"
CUDA = "csrc/bits/cuda/kernels.cu"
ACCESS = "csrc/access.cuh"
CODE = "csrc/codes/code.h"
TABLES = "csrc/binding/codes/tables.cpp"
CODE_LAUNCH = "csrc/binding/codes/launch.cpp"
CPU_LOOKUP = "csrc/codes/cpu/kernels.cpp"
CUDA_LOOKUP = "csrc/codes/cuda/kernels.cu"
CUDA_RECIPES = "csrc/recipes/cuda/thread.cuh"
CUDA_FORM = "csrc/recipes/cuda/form.cuh"
CUDA_LAUNCH = "csrc/recipes/cuda/launch.cuh"
CUDA_KERNELS = "csrc/recipes/cuda/kernels.cu"
CUDA_INTERPRETER = "csrc/recipes/cuda/interpreter.cu"
CUDA_VECTORS = "csrc/recipes/cuda/vectors.cuh"
CUDA_BATCH_NORM = "csrc/recipes/cuda/batch_norm.cu"
CUDA_BATCH_NORM_SHARED = "csrc/recipes/cuda/batch_norm.cuh"
CUDA_BATCH_NORM_PLANES = "csrc/recipes/cuda/batch_norm_planes.cu"
BATCH_NORM = "csrc/binding/recipes/gradients/batch_norm.cpp"
CUDA_LAYER_NORM = "csrc/recipes/cuda/layer_norm.cu"
LAYER_NORM = "csrc/binding/recipes/gradients/layer_norm.cpp"
CUDA_GROUP_NORM = "csrc/recipes/cuda/group_norm.cu"
GROUP_NORM = "csrc/binding/recipes/gradients/group_norm.cpp"
CUDA_JOIN = "csrc/recipes/cuda/join.cu"
JOIN = "csrc/binding/recipes/joined.cpp"
CASTS = "csrc/binding/recipes/gradients/casts.cpp"
NORMS = "csrc/binding/recipes/gradients/norms.cpp"
ELEMENTWISE = "csrc/binding/recipes/gradients/elementwise.cpp"
ANSWERS = "csrc/binding/recipes/gradients/answers.cpp"
CAT = "csrc/binding/recipes/gradients/cat.cpp"
RELU = "csrc/binding/recipes/gradients/relu.cpp"
PARTIAL = "csrc/binding/recipes/partial.cpp"
SOFTMAX = "csrc/binding/recipes/gradients/softmax.cpp"
VERIFICATION = "csrc/binding/recipes/verification.h"

VALUE = "csrc/binding/recipes/value.cpp"
VALUE_HEADER = "csrc/binding/recipes/value.h"
WEAK_TENSOR = "csrc/binding/recipes/weak_tensor.cpp"
COMPUTING = "csrc/binding/recipes/computing.cpp"
COMPUTING_HEADER = "csrc/binding/recipes/computing.h"
LOWERING = "csrc/binding/recipes/lowering.cpp"
TABULATION = "csrc/binding/recipes/tabulation.cpp"
TILING = "csrc/binding/recipes/tiling.cpp"
CONSTANT = "csrc/binding/recipes/constant.h"
FUSION = "csrc/binding/recipes/fusion.cpp"
INSTRUCTIONS = "csrc/recipes/instructions.h"
PROGRAM = "csrc/recipes/program.h"
CPU_PROGRAM = "csrc/recipes/cpu/kernels.cpp"
CPU_MASKS = "csrc/recipes/cpu/masks.cpp"
HOOK = "csrc/binding/recipes/hook.cpp"
DERIVATION = "csrc/binding/recipes/derivation.cpp"
FROM_HALF = "csrc/binding/recipes/from_half.cpp"
SCALARS = "csrc/binding/recipes/scalars.cpp"
OPERANDS = "csrc/binding/recipes/operands.cpp"
CALLS = "csrc/binding/recipes/calls.cpp"
LEAVES = "csrc/binding/recipes/leaves.cpp"
PACKED_MASKS = "csrc/binding/recipes/masks.cpp"
RECIPES = "activations_cuda/recipes/"

UNBROKEN = Mutant("nothing is broken", MASK, "kMaskBits = 8", "kMaskBits = 8")

SHARED = [
    Mutant("hardtanh: inside at max_val", ACTIVATIONS, "x >= max_val", "x > max_val"),
    Mutant("relu: inside at 0", ACTIVATIONS, "negation(x <= T(0))", "negation(x < T(0))"),
    Mutant("hardsigmoid: inside at -3", ACTIVATIONS, "x > T(-3)", "x >= T(-3)"),
    Mutant("leaky_relu: inside at 0", ACTIVATIONS, "return x > T(0);", "return x >= T(0);"),
    Mutant("hardshrink: inside at lambd", ACTIVATIONS, "abs(x) <= lambd", "abs(x) < lambd"),
    Mutant("hardshrink: lambd not in the dtype", ACTIVATIONS, "lambd(in_dtype<scalar_t>(lambd))", "lambd(lambd)"),
    Mutant("threshold: inside at it", ACTIVATIONS, "negation(x <= threshold)", "negation(x < threshold)"),
    Mutant("affine: not inside below 1/2", ACTIVATIONS, "(y > T(0)) & (y < T(1))", "(y > T(0.5)) & (y < T(1))"),
    Mutant("rows that step unevenly", STRIDES, "stride == next)", "true)"),
    Mutant("dimensions joined for the gradient alone", STRIDES, "mask_stride == walk.mask[inner] * walk.size[inner]", "true"),
    Mutant("strides that are not dense", STRIDES, "if (strides[dim] != next) {", "if (false) {"),
    Mutant("the gradient's layout first for all", AUTOGRAD, "rule.reads_gradient_first ?", "true ?"),
    Mutant("the input's layout for all", AUTOGRAD, "derivative.saves == Saves::output ? output : self", "self"),
    Mutant("the written tensor's layout for all", AUTOGRAD, "derivative.saves == Saves::input ? ordered : self", "self"),
    Mutant("a mask of any length", ARGUMENTS, "mask.sym_numel() == bytes", "true"),
    Mutant("a mask of any strides", ARGUMENTS, "&& mask.is_contiguous()", ""),
    Mutant("a mask of any dtype", ARGUMENTS, "mask.scalar_type() == at::kByte", "true"),
    Mutant("a code without its high bits", CODE, "return low | high << kLow;", "return low;"),
    Mutant("no code for the last group", CODE, "return groups_of(numel) * bits;", "return numel / kGroup * bits;"),
    Mutant("no byte for the last bits", MASK, "(numel + (kMaskBits - 1)) / kMaskBits", "numel / kMaskBits"),
    Mutant(
        "a mask is leaked",
        LAUNCH,
        "run<Op, Backend>(self, output, mask.mutable_data_ptr<uint8_t>(), parameters...);",
        "run<Op, Backend>(self, output, (*new at::Tensor(mask)).mutable_data_ptr<uint8_t>(), parameters...);",
    ),
]

ON = {
    "cpu": [
        Mutant("NaN is clamped", ACTIVATIONS, "x < low ? low : x", "x > low ? x : low"),
        Mutant("the tail's bits are not packed", CPU_BLOCK, "  if (i < n) {\n    const", "  if (i + 1 < n) {\n    const"),
        Mutant("bits past the end", CPU_BLOCK, "std::fill(flags + n, flags + (n + 15) / 16 * 16, 0);", ""),
        Mutant("the tail is not scaled", CPU_BACKWARD, "  if (i < n) {\n    octet", "  if (i + 1 < n) {\n    octet"),
        Mutant("the tail is one too long", CPU_BACKWARD, "(n - i) * sizeof(scalar_t)", "(n - i + 1) * sizeof(scalar_t)"),
        Mutant("bits in the other order", CPU_BACKWARD, "{1, 2, 4, 8, 16, 32, 64, 128}", "{128, 64, 32, 16, 8, 4, 2, 1}"),
        Mutant("a slope of 0 multiplies", CPU_BACKWARD, "if (slope == 0) {", "if (false) {"),
        Mutant("a half type's slope outside", CPU_BACKWARD, "multiplies(inside) || multiplies(outside)", "multiplies(inside)"),
        Mutant("rows without their pitch", CPU_BLOCK, "row * rows.pitch + column", "row * rows.length + column"),
        Mutant("a walk that doesn't go back", CPU_BACKWARD, "      offset -= at[dim] * walk.grad[dim];\n", ""),
        Mutant("a walk in steps of one", CPU_BACKWARD, "grad[offset + k * walk.grad[0]]", "grad[offset + k]"),
        Mutant("the last block is left out", DEVICES, "(n + unit - 1) / unit", "n / unit"),
        Mutant("a thread begins one late", DEVICES, "kernel(first * unit,", "kernel(first * unit + (first > 0),"),
        Mutant("an input of its neighbor's number", CPU_LOOKUP, "of_group.get(i)", "of_group.get(0)"),
        Mutant("a lock that a fork leaves held", TABLES, "[] { new (&making) std::mutex; }", "[] {}"),
        Mutant("the tail is not decoded", CPU_LOOKUP, "i < end; ++i) {\n        x[", "i + 1 < end; ++i) {\n        x["),
        Mutant("hardsigmoid: a sixth as on CUDA", ACTIVATIONS, "return x / T(6);", "return x * T(1.0f / 6.0f);"),
    ],
    "cuda": [
        Mutant("sums in another order", CUDA_BATCH_NORM, "int k = 1; k < kSums; ++k", "int k = kSums - 1; k > 0; --k"),
        Mutant(
            "a mean that is rounded",
            CUDA_BATCH_NORM,
            "__fmaf_rn(-of_grad[i], inverse_rows, grad[i])",
            "grad[i] - of_grad[i] * inverse_rows",
        ),
        Mutant("the next row begins later", CUDA_RECIPES, "i < rest_[u] ? x_", "i <= rest_[u] ? x_"),
        Mutant("the next row is this one", CUDA_RECIPES, "find_row(i + 1, next_[u])", "find_row(i, next_[u])"),
        Mutant(
            "the next row's values are this one's",
            CUDA_RECIPES,
            "words_[k][r][u][kNext], element",
            "words_[k][r][u][kHere], element",
        ),
        Mutant("any bias of the next row", CUDA_RECIPES, "is_number = layout(k, r) == Layout::number;", "is_number = false;"),
        Mutant("nothing is rounded", CUDA_RECIPES, "!is_rounded_next(k) && ", "false && "),
        Mutant("the row's element for the next one", CUDA_INTERPRETER, "i < rest_[u] ? both.x : both.y", "both.x"),
        Mutant("the next row is this one, interpreted", CUDA_INTERPRETER, "-rest_[u], next_[u]", "-rest_[u], row_[u]"),
        Mutant("elements of one row", CUDA_INTERPRETER, "(i < rest_[u] ? here : next) + i", "here + i"),
        Mutant("columns that cross rows", CUDA_INTERPRETER, "has_whole_rows && !is_bit && ", "!is_bit && "),
        Mutant("vectors that cross rows", CUDA_INTERPRETER, "(has_whole_rows && std::all_of", "(std::all_of"),
        Mutant("a vector's bits are the byte's first", CUDA_VECTORS, " >> (offset % kMaskBits)", ""),
        Mutant("a thread has vectors of other columns", CUDA_INTERPRETER, "program.dims > 1 && size % n == 0 ?", "false ?"),
        Mutant("what is stashed lies over an operand", CUDA_INTERPRETER, "given.stash = bytes;", "given.stash = 0;"),
        Mutant("32-bit indices for any size", CUDA_KERNELS, "!has_few_elements(program)", "false"),
        Mutant(
            "bits from within a byte", CUDA_KERNELS, "operand.element == Element::bit && elements % kMaskBits != 0", "false"
        ),
        Mutant(
            "both halves are the first", CUDA_KERNELS, "operand.data = advance(operand.data, operand.element, elements);", ""
        ),
        Mutant("every sample is the first", CUDA_RECIPES, "outer_[u][1] = sample;", "outer_[u][1] = 0;"),
        Mutant("both of a pair are the first", CUDA_RECIPES, "outer_[u][0] = u;", "outer_[u][0] = 0;"),
        Mutant("a pair of any two rows", CUDA_FORM, " || program.size[1] != 2", ""),
        Mutant(
            "twins of any tensors", CUDA_FORM, "(one.data) + bytes == reinterpret_cast<uintptr_t>(two.data)", "(one.data) != 0"
        ),
        Mutant("a pair that rounds anyway", CUDA_FORM, " != Form::rounds(k)", " && false"),
        Mutant("the twin's own half", CUDA_RECIPES, "is_twin ? 1 - u : u", "u"),
        Mutant(
            "operands in the program's order",
            CUDA_LAUNCH,
            "= program.operand[program.instruction[k].reference[r].operand]",
            "= program.operand[Form::operand(k, r)]",
        ),
        Mutant("a sum that isn't fused", INSTRUCTIONS, "return fma(x, a, b);", "return x * a + b;"),
        Mutant("rows that aren't repeated", TILING, "append({0, operand", "append({1, operand"),
        Mutant("joined rows are next to each other", TILING, "operand.stride[1] *= rows;", ""),
        Mutant("every sample's gate is the first's", TILING, "operand->stride[dim] = elements;", "operand->stride[dim] = 0;"),
        Mutant("rows that don't continue", TILING, "continues(*program, operand) || is_column(*program, operand)", "true"),
        Mutant("what is rounded to 0 isn't", CUDA_BATCH_NORM_SHARED, "0x1p-25f : 0x1p-134f", "0.0f : 0.0f"),
        Mutant("products that aren't rounded", CUDA_BATCH_NORM_PLANES, "round<T>(product);", ""),
        Mutant("threads' sums that aren't rounded", CUDA_BATCH_NORM_PLANES, "round<T>(others);", ""),
        Mutant("a slope in another order", CUDA_BATCH_NORM_PLANES, "inverse * invstd * invstd", "invstd * invstd * inverse"),
        Mutant("planes of another width", CUDA_BATCH_NORM_PLANES, "width < plane && width < kThreads", "width < kThreads"),
        Mutant("planes in vectors of another width", CUDA_BATCH_NORM_PLANES, "width < plane &&", "width <= plane &&"),
        Mutant("beside a plane", CUDA_BATCH_NORM_PLANES, "first_ < norm.plane ?", "true ?"),
        Mutant("past the last vector", CUDA_BATCH_NORM_PLANES, "if (u < many_)", "if (true)"),
        Mutant("the next plane begins later", CUDA_BATCH_NORM_PLANES, "x_ >= norm_.plane", "x_ > norm_.plane"),
        Mutant("every vector has a mask's first bits", CUDA_BATCH_NORM_SHARED, " >> (offset % kMaskBits)", ""),
        Mutant("a plane's gradient is read as channels", BATCH_NORM, "plane_of(input) == plane_of(grad) && ", ""),
        Mutant("strides of the input", BATCH_NORM, "plane() == 1 ? at", "true ? at"),
        Mutant("a single channel is a plane", BATCH_NORM, "plane > 1 && tensor.stride(1) == 1 ? 0", "false ? 0"),
        Mutant("a norm that others read", ANSWERS, "next.use_count() == (has_saved ? 3 : 2) && ", ""),
        Mutant("a hook that comes during the pass", ANSWERS, " && python.ref_count() == kHoldersOfWrapper", ""),
        Mutant("hooks miss a gradient", ANSWERS, "node.pre_hooks().size() > 1 ||", "false &&"),
        Mutant("hooks on the norm's output", ANSWERS, "next.tensor_pre_hooks().empty() && ", ""),
        Mutant(
            "hooks outside asked twice",
            BATCH_NORM,
            "value && !value_of(value).follows_from_outside()",
            "static_cast<bool>(value)",
        ),
        Mutant("any slopes", BATCH_NORM, "slopes.inside == 1 && slopes.outside == 0 && ", ""),
        Mutant("NaN that nobody finds", ANSWERS, "return !is_checked && ", "return "),
        Mutant("an output that was written to", BATCH_NORM, "value_of(output).check_unwritten();", ""),
        Mutant(
            "warps in another order",
            CUDA_LAYER_NORM,
            "(parts[2] + 0.0f)) + (parts[1] + 0.0f",
            "(parts[1] + 0.0f)) + (parts[2] + 0.0f",
        ),
        Mutant(
            "threads in another order",
            CUDA_LAYER_NORM,
            "(parts[0] + parts[2]) + (parts[1] + parts[3])",
            "(parts[0] + parts[1]) + (parts[2] + parts[3])",
        ),
        Mutant("rows in other sums", CUDA_LAYER_NORM, "rows = 8;", "rows = 16;"),
        Mutant(
            "many rows as few",
            CUDA_LAYER_NORM,
            "norm.rows > LayerNormGradient::kManyRows && ",
            "norm.rows > 2 * LayerNormGradient::kManyRows && ",
        ),
        Mutant("wide rows as narrow", CUDA_LAYER_NORM, " && norm.columns / tile < multiprocessors / 2", ""),
        Mutant("the last columns left out", CUDA_LAYER_NORM, "(norm.columns + tile - 1) / tile", "norm.columns / tile"),
        Mutant(
            "strides of the input",
            LAYER_NORM,
            "at::empty_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT)",
            "at::empty_like(input)",
        ),
        Mutant("a wait that isn't allowed", VERIFICATION, "catch (const c10::Error&)", "catch (const c10::OutOfMemoryError&)"),
        Mutant(
            "a product that is rounded",
            CUDA_LAYER_NORM,
            "__fmaf_rn(grad[vector][i], count * weight[vector][i], -projected)",
            "(grad[vector][i] * (count * weight[vector][i]) - projected)",
        ),
        Mutant("dropout's scale", ELEMENTWISE, "1 / (1 - p)", "1 / p"),
        Mutant("dropout scales in evaluation", ELEMENTWISE, "!dropout->train.value_or(false) ? 1 : ", ""),
        Mutant(
            "rows before they are there",
            CUDA_LAYER_NORM,
            "__pipeline_wait_prior(many - 2);",
            "__pipeline_wait_prior(many - 1);",
        ),
        Mutant(
            "hooks on a cast",
            CASTS,
            "has_hooks(*cast) ||",
            "",
        ),
        Mutant("a gradient that others have", CASTS, "is_alone(grad) &&", ""),
        Mutant("a gradient left in the half type", ANSWERS, "grads[0] = grads[0].to(dtype_of_output(node));", ""),
        Mutant("a norm's input that was written to", CASTS, "value_of(object).check_unwritten();", ""),
        Mutant(
            "a plane's threads in another order",
            CUDA_GROUP_NORM,
            "add_up<8>(sum, 4);\n  add_up<4>(sum, 2);",
            "add_up<8>(sum, 2);\n  add_up<4>(sum, 4);",
        ),
        Mutant(
            "a plane's warps in another order",
            CUDA_GROUP_NORM,
            "add_up<1>(sum, 16);\n      add_up<1>(sum, 8);",
            "add_up<1>(sum, 2);\n      add_up<1>(sum, 8);",
        ),
        Mutant("small planes as large", CUDA_GROUP_NORM, "norm.plane < kManyLanes ?", "norm.plane < kWarp ?"),
        Mutant("many samples as few", CUDA_GROUP_NORM, "norm.samples <= kFewSamples ?", "norm.samples <= 2 * kFewSamples ?"),
        Mutant(
            "the other product first",
            CUDA_GROUP_NORM,
            "__fmaf_rn(scale, grad[i], slope * input[i])",
            "__fmaf_rn(slope, input[i], scale * grad[i])",
        ),
        Mutant(
            "a product of the mean that is rounded",
            CUDA_GROUP_NORM,
            "__fmaf_rn(-grad[u], mean[u], product[u])",
            "(product[u] - grad[u] * mean[u])",
        ),
        Mutant("a group norm's statistics that have gradients", GROUP_NORM, " || has_others", ""),
        Mutant("a clone that others have", CASTS, " && (!clone || passes_unnoticed(*clone))", ""),
        Mutant("hooks on a clone", CASTS, "is_watched(*clone) ? nullptr : ", ""),
        Mutant("hooks on a smooth node", CASTS, "is_watched(node_, /*post_hooks=*/0)", "false"),
        Mutant("a layout that others see", NORMS, " && passes_unnoticed(node, /*has_saved=*/true)", ""),
        Mutant(
            "a part's first block of the part before", CUDA_JOIN, "blocks_before <= blockIdx.x", "blocks_before < blockIdx.x"
        ),
        Mutant("parts in one place", CUDA_JOIN, "launch.width += width;", "launch.width = width;"),
        Mutant("pieces beyond the part", CUDA_JOIN, "if (column < part.pieces)", "if (true)"),
        Mutant("what is joined in two layouts", JOIN, "tensor.suggest_memory_format() == format", "true"),
        Mutant("what is joined that isn't aligned", JOIN, " || !is_aligned(tensor)", ""),
        Mutant("what is joined of other sizes", JOIN, "first.sizes() != at::IntArrayRef(sizes) || ", ""),
        Mutant("factors of the first number", CUDA_LOOKUP, "(number << 16 | y)", "y"),
        Mutant("no factors beyond the direct ones", CUDA_LOOKUP, "(1u << bits) <= kDirect || number < kDirect", "true"),
        Mutant(
            "+0 is not selected",
            CUDA_LOOKUP,
            "== 0x80000000u ? scalar_t(0) :",
            "== 0x80000000u ? static_cast<scalar_t>(product) :",
        ),
        Mutant("an output that isn't aligned", CUDA_LOOKUP, "!is_aligned(grad) || !is_aligned(y)", "!is_aligned(grad)"),
        Mutant("a second factor is left out", CUDA_LOOKUP, "i < factors; ++i", "i < 1; ++i"),
        Mutant(
            "the last output is not written",
            CUDA_LOOKUP,
            "first + i < n; ++i) {\n    y[",
            "first + i + 1 < n; ++i) {\n    y[",
        ),
        Mutant(
            "the last input is not decoded",
            CUDA_LOOKUP,
            "first + i < n; ++i) {\n    x[",
            "first + i + 1 < n; ++i) {\n    x[",
        ),
        Mutant(
            "the last gradient is not scaled",
            CUDA_LOOKUP,
            "first + i < n; ++i) {\n    to[first + i] = times(grad[first",
            "first + i + 1 < n; ++i) {\n    to[first + i] = times(grad[first",
        ),
        Mutant(
            "blocks for four groups where a thread has two",
            CUDA_LOOKUP,
            "blocks<scalar_t, groups.value>(n)",
            "blocks<scalar_t, groups.value * groups.value>(n)",
        ),
        Mutant("a second group's number has the first one's bits", CUDA_LOOKUP, "      numbers = {};\n", ""),
        Mutant("a second group has the first one's inputs", CUDA_LOOKUP, "(bytes[k])", "(bytes[0])"),
        Mutant("a second group has the first one's outputs", CUDA_LOOKUP, "(outputs[k])", "(outputs[0])"),
        Mutant("a walk without its place in the group", CUDA_LOOKUP, "numbers.get(place % kGroup)", "numbers.get(i)"),
        Mutant("PyTorch is not asked", TABLES, "if (tables && !agrees_with_pytorch(", "if (false && !agrees_with_pytorch("),
        Mutant("NaN is clamped by the GPU", ACTIVATIONS, "max.NaN.f32", "max.f32"),
        Mutant("the tail is one too long", ACCESS, "return first + size <= n;", "return first + size <= n + 1;"),
        Mutant(
            "the scalar tail is one too short",
            CUDA,
            "i < size && first + i < n; ++i) {\n        const",
            "i < size && first + i + 1 < n; ++i) {\n        const",
        ),
        Mutant(
            "the scaled tail is one too long",
            CUDA,
            "i < size && first + i < n; ++i) {\n      y",
            "i < size && first + i <= n; ++i) {\n      y",
        ),
        Mutant("bits in the other order", CUDA, "<< (threads * size)", ">> (threads * size)"),
        Mutant("bits of the byte's first vector", CUDA, " >> (first % kMaskBits)", ""),
        Mutant("aligned where it is not", ACCESS, "% kVectorBytes == 0;", "% 8 == 0;"),
        Mutant("no shift within a word", ACCESS, "shift % sizeof(unsigned int) * 8", "0"),
        Mutant("a vector past the end of its row", ACCESS, "is_between && rest >= size", "is_between"),
        Mutant("a reciprocal rounded down", ACCESS, "(31 + shift_)) + divisor - 1)", "(31 + shift_)))"),
        Mutant("a walk that runs past its dimension", ACCESS, "if (--*rest > 0) {", "if (--*rest >= 0) {"),
        Mutant("a walk's tail is not stored", CUDA, "if (first + i < n) {\n      y", "if (first + i + 1 < n) {\n      y"),
        Mutant("too few blocks", CUDA, "blocks<scalar_t, vectors.value>(n)", "blocks<scalar_t, 2>(n)"),
        Mutant("32-bit indices", ACCESS, "return (piece *", "return static_cast<int>(piece *"),
        Mutant("a slope of 0 multiplies", CUDA, "slope == 0 ? scalar_t(0) : scaled", "scaled"),
        Mutant("outside keeps nothing, whatever the slope", CUDA, "inside == 1 && outside == 0", "inside == 1"),
        Mutant("kernels on the default stream", DEVICES, "kernel(handle(current_stream(on.device())))", "kernel(nullptr)"),
        Mutant("no guard for the device", DEVICES, "const c10::DeviceGuard guard(on.device());", ""),
        Mutant("a mask on any device", ARGUMENTS, "mask.device() == grad.device()", "true"),
    ],
}


RECOMPUTE = [
    Mutant("a write is not seen", VALUE, "found == version, ", "true, "),
    Mutant("remembered for good", COMPUTING, "std::exchange(value->remembered_, at::Tensor())", "value->remembered_"),
    Mutant("strides are not restored", COMPUTING, "tensor.strides() == strides ? tensor", "true ? tensor"),
    Mutant(
        "kept with its history",
        VALUE,
        "is_itself ? tensor : at::Tensor(tensor.tensor_data())",
        "true ? tensor : tensor",
    ),
    Mutant("nodes by their address alone", VALUE, " || found->second->node_->expired()", ""),
    Mutant("writes to what others hold", COMPUTING, " && strided.storage().use_count() == 1", ""),
    Mutant(
        "computed under autocast",
        COMPUTING_HEADER,
        "itself\n  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset}",
        "itself\n  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::DispatchKeySet()}",
    ),
    Mutant("a value of another version", VALUE, "version != version_of(tensor) || ", ""),
    Mutant(
        "an operand that was written to",
        OPERANDS,
        "return value.is_current() && !value.is_partial",
        "return !value.is_partial",
    ),
    Mutant(
        "any hook is a scope's",
        HOOK,
        "second.ptr(getPyInterpreter()) == unpack_hook().ptr();",
        "second.ptr(getPyInterpreter());",
    ),
    Mutant("a cube's derivative by the cube", ELEMENTWISE, "py::float_(factor.number - 1)", "py::float_(factor.number)"),
    Mutant("a gradient that isn't verified", ELEMENTWISE, "fits(factor, grad, of_saved, dtype) ? ", "true ? "),
    Mutant("a sum of rounded gradients", ELEMENTWISE, " && wanted.is_same_shape(grad)", ""),
    Mutant("a factor that was written to", ELEMENTWISE, "value_of(each).check_unwritten();", ""),
    Mutant("any power's derivative", ELEMENTWISE, "is_known_exponent(static_cast<float>(exponent)) ?", "true ?"),
    Mutant("a product of other dtypes", ELEMENTWISE, "(device.is_cpu() && is_float)", "device.is_cpu()"),
    Mutant("a cast that others have", CASTS, "passes_unnoticed(node, /*has_saved=*/true) && (!clone", "(!clone"),
    Mutant("what is overwritten is kept", HOOK, "keep(clone, value_of(value).source, outer);", "value;"),
    Mutant("a part says how it was laid out", JOIN, "value_of(value).is_rearranged = true;", ""),
    Mutant("a half says how it was laid out", FROM_HALF, "value_of(recipe.operands[0]).is_rearranged = true;", ""),
    Mutant("what hooks around have is current", VALUE, "int64_t{outside->version.current_version()}", "version"),
    Mutant(
        "a recipe of what is overwritten", HOOK, "value_of(value).is_recipe() && !is_written", "value_of(value).is_recipe()"
    ),
    Mutant("a recipe's version, in place", HOOK, "value_of(value).replaced.reset();", ""),
    Mutant("a sharded weight is not copied", LEAVES, "keep(parameter.clone())", "keep(parameter)"),
    Mutant("a gradient that isn't selected", INSTRUCTIONS, "first == 0 && std::signbit(first) ? 0.0f : ", ""),
    Mutant("moved in float32", COMPUTING, "wide.half() == value.dtype", "false"),
    Mutant("movements of a half type computed anew", COMPUTING, "if (operand.readers < 2) {", "if (true) {"),
    Mutant("hooks outside asked twice", VALUE_HEADER, "return readers > 1 && follows_from_outside();", "return false;"),
    Mutant("a conjugate view by its geometry", HOOK, "if (tensor.is_conj() != base.is_conj() ||", "if (false &&"),
    Mutant("half types mixed", COMPUTING, "(result != at::ScalarType::Undefined && result != dtype)", "false"),
    Mutant("a rule for every output", DERIVATION, "step.output_nr && !(is_op", "false && !(is_op"),
    Mutant("the formula is not in the key", DERIVATION, "id_of_object(recipe.formula), ", ""),
    Mutant("writes between op and saver", DERIVATION, "recipe.version > recipe.max_writes", "false"),
    Mutant("no verification", RECIPES + "hook.py", "if untried and not verify(recipe, untried, tensor):", "if False:"),
    Mutant("no trials", RECIPES + "verification.py", "for trial in range(", "for trial in range(0 * "),
    Mutant("trials of the bias that cancels alone", RECIPES + "verification.py", "if trial % 2:", "if False:"),
    Mutant(
        "trials with centered numbers",
        RECIPES + "verification.py",
        "memory.normal_(mean=1.0, ",
        "memory.normal_(mean=0.0, ",
    ),
    Mutant("running statistics that were written to", CALLS, 'norm->variable(NAME("training")).ptr() != Py_False', "true"),
    Mutant("a weak tensor that was written to", WEAK_TENSOR, " || counter_.current_version() != version_", ""),
    Mutant("what a pass was given, forgotten", COMPUTING, "if (given_)", "if (false)"),
    Mutant(
        "the version of a tensor computed again",
        COMPUTING,
        "return compute_in_version(is_new);",
        "return compute(is_new);",
    ),
    Mutant("formulas of subclasses", COMPUTING, "TorchFunction::State::ALL_DISABLED", "TorchFunction::State::ENABLED"),
    Mutant("other data", VALUE, ": is_same_memory(held, tensor);", ": true;"),
    Mutant("a configuration for each position", DERIVATION, "is_movement ? id_of_position", "is_tabulated ? id_of_position"),
    Mutant("sums of multiples in any strides", RECIPES + "formulas.py", "return alpha != 1", "return False"),
    Mutant("the sign of a zero behind layer norm", RECIPES + "norms.py", ", on_cpu=(layer_norm_centered_on_cpu,)", ""),
    Mutant("the caller of whatever calls the op", HOOK, "return called && !(", "return called || !("),
    Mutant("running statistics copied too late", OPERANDS, "return value.copy;  // or null", "return data;"),
    Mutant("complex numbers in any strides", DERIVATION, " || c10::isComplexType(recipe.dtype)", ""),
    Mutant("zeros prove a formula", RECIPES + "verification.py", "is_proof = _tells(tensor)", "is_proof = True"),
    Mutant("a norm's bias proves its formula", RECIPES + "verification.py", " and all(map(_is_more_than_bias, norms))", ""),
    Mutant("trials at each use", RECIPES + "verification.py", "_chosen_by_trials.get(each.configuration_id)", "None"),
    Mutant("trials in another dtype", RECIPES + "norms.py", "[torch.zeros_like(each) for each in statistics]", "[None, None]"),
    Mutant("whatever the eps", DERIVATION, "py::isinstance(recipe.formula, from_python().candidates)", "false"),
    Mutant("tangents in recipes", COMPUTING_HEADER, "no_tangents{false}", "no_tangents{true}"),
    Mutant("what an earlier scope computed", OPERANDS, " || is_outdated(step)", ""),
    Mutant("what an earlier step computed", LEAVES, "std::max(begins, last_backward.ended)", "begins"),
    Mutant("trials far from the mean", RECIPES + "verification.py", "std=2.0 ** -(trial % 8), ", ""),
    Mutant("trials without zeros", RECIPES + "verification.py", "if trial % 8 == 3:", "if False:"),
    Mutant("equal in an earlier pass", VALUE, "!is_of_earlier_pass(before.sequence, before.thread)", "true"),
    Mutant("a recipe's tensor was written to", VALUE, "replaced && int64_t{replaced->current_version()} != version", "false"),
    Mutant("equal but for a number", VALUE, "a.is(b) || py::repr(a).equal(py::repr(b))", "true"),
    Mutant(
        "statistics in columns", DERIVATION, "!strides || !agree(sizes, *strides", "!strides || false && !agree(sizes, *strides"
    ),
    Mutant("a leaf whose source was written to", OPERANDS, "is_of_leaf && is_alias(leaf_of(*node))", "false"),
    Mutant("a leaf is held as another tensor", VALUE, "is_itself ? tensor", "false ? tensor"),
    Mutant("what vmap wraps as what the op was given", CALLS, " || is_transformed(*norm)", ""),
    Mutant("each reader searches anew", OPERANDS, "if (dead_ends().contains(node, output_nr))", "if (false)"),
    Mutant("what does not follow yet never will", VALUE, "if (outputs_.count(output) > 0)", "if (false)"),
    Mutant("too deep for one is too deep for all", DERIVATION, "if (may_succeed_later)", "if (false)"),
    Mutant("what one scope's rules can't others can't", VALUE, "if (scope_and_rules != scope_and_rules_ ||", "if ("),
    Mutant("recipes that are given up have readers", DERIVATION, "--value_of(each).readers;", ";"),
    Mutant("a view of gaps that hooks around close", HOOK, "!outer.is_none() && !is_dense(", "false && !is_dense("),
    Mutant(
        "bits that hooks around give back once",
        PACKED_MASKS,
        "!outer.is_none() || value_of(value).follows_from_outside()",
        "false",
    ),
    Mutant("softshrink in any strides", RECIPES + "formulas.py", "F.softshrink: TABULATED_VARIES", "F.softshrink: TABULATED"),
    Mutant("equal but for an operand", VALUE, "return a.is(b);", "return true;"),
    Mutant(
        "a permutation the other way round",
        FUSION,
        "strides[leaf.order[dim]] = tensor",
        "strides[dim] = tensor",
    ),
    Mutant("parts that nobody has kept", JOIN, "!can_be_kept(*parts", "true || !can_be_kept(*parts"),
    Mutant("what is computed in inference mode", HOOK, "no_inference.emplace(false)", "no_inference.emplace(true)"),
    Mutant("what a handler raises is lost", HOOK, "|| is_to_raise(error.value())", "|| (is_to_raise(error.value()), false)"),
    Mutant("an error that can't be logged", HOOK, "// of who logs it, or for want of stack", "throw;"),
    Mutant("a clone's memory is shared", HOOK, "!is_shared || ", "true || "),
    Mutant(
        "strides that a saved clone has",
        COMPUTING,
        "const auto wanted = strides_of();",
        "const auto wanted = has_strides ? strides_of() : std::nullopt;",
    ),
    Mutant("a view of other data", HOOK, " || !tensor.is_alias_of(base)", ""),
    Mutant("bools of one bit", CPU_MASKS, "(bools[first + i] != 0) << i", "bools[first + i] << i"),
    Mutant("a layout that nobody knows", DERIVATION, "is_cpu() && depends_on_layout(recipe) &&", "is_cpu() && false &&"),
    Mutant("other bits of a program", RECIPES + "verification.py", "each.fuses = False", "each.fuses = True"),
    Mutant("shift contracted as in affine", INSTRUCTIONS, "fma(x, scale, d - a * scale)", "fma(x, scale, fma(-a, scale, d))"),
    Mutant("not rounded between ops", LOWERING, "rounded_to = element_of(recipe.dtype);", "rounded_to = Element::float32;"),
    Mutant(
        "no sum is passed over", LOWERING, "lowered_.passes_over_shared |= is_allowed;\n    return is_allowed;", "return false;"
    ),
    Mutant("a sum that many read", LOWERING, "kMaxReaders = 3;", "kMaxReaders = 99;"),
    Mutant("a sum of what isn't there", LOWERING, "!leaf.value || leaf.is_bits || is_there(*leaf.value)", "true"),
    Mutant(
        "an operand that the op rounds first",
        LOWERING,
        "recipe.dtype != at::kFloat && !are_all_of(recipe.dtype, recipe.operands)",
        "false",
    ),
    Mutant("a difference the other way around", INSTRUCTIONS, "fma(-a, b, x)", "fma(a, b, -x)"),
    Mutant(
        "a quotient that commutes", LOWERING, "formula.opcode == Opcode::multiply || (", "(formula.opcode != Opcode::add) || ("
    ),
    Mutant("a table of what isn't stashed yet", TABULATION, "if (!is_stashed && ", "if ("),
    Mutant(
        "a table of what reads another tensor",
        TABULATION,
        "return reference.operand < 0 || are_same",
        "return true || are_same",
    ),
    Mutant("a table of what isn't rounded", TABULATION, " && instruction.rounded_to == element) {", ") {"),
    Mutant("a table of few elements", TABULATION, "kFewestElements = 8 * kNumbersOfHalf", "kFewestElements = 1"),
    Mutant("numbers are made for each table", CONSTANT, "if (found != known_.end()) {", "if (false) {"),
    Mutant("the CPU reads a tensor again", LOWERING, "!lowered_.root->device->is_cpu() && instructions", "instructions"),
    Mutant(
        "a table of the same memory in other strides",
        TABULATION,
        " && std::equal(a.stride, a.stride + program.dims, b.stride)",
        "",
    ),
    Mutant("halves in their order", FUSION, "between = -between;", ""),
    Mutant("halves from the first", FUSION, "offsets_[k] = between;", ""),
    Mutant("half of them negated wrongly", FUSION, "at::tensor({-1.0f, 1.0f})", "at::tensor({1.0f, -1.0f})"),
    Mutant("halves of two tensors", LOWERING, " || !first.operands[0].is(second.operands[0])", ""),
    Mutant("every second for a half", LOWERING, "given(3) != 1 ? -1 :", ""),
    Mutant("the middle for a half", LOWERING, "start == half || start == -half ? 1 : -1;", "1;"),
    Mutant("halves that are joined elsewhere", LOWERING, "input.sizes_of() == at::IntArrayRef(recipe.sizes) ?", "true ?"),
    Mutant("halves that aren't vectors", LOWERING, "recipe.sizes.back() % (2 * kElementsOfVector) != 0", "false"),
    Mutant("other groups of the same channels", FUSION, "groups > 0 && groups != tensor.size(1)", "false"),
    Mutant("halves of halves", LOWERING, "!input || swaps_halves_ || ", "!input || "),
    Mutant("halves in another order of dimensions", LOWERING, "swaps_halves_ || !order_.empty() || ", "swaps_halves_ || "),
    Mutant("halves of other sizes", LOWERING, " || recipe.sizes != lowered_.sizes ||", " ||"),
    Mutant("halves of bits", LOWERING, "is_moved = !order_.empty() || swaps_halves_;", "is_moved = !order_.empty();"),
    Mutant("other sizes beside halves", LOWERING, "order_.empty() && !has_halves_ && ", "order_.empty() && "),
    Mutant("halves of groups", FUSION, "geometry.sizes[last] != lowered_.sizes.back()", "false"),
    Mutant("a half is verified as any part", DERIVATION, "configuration.push_back(half_shown(recipe));", ""),
    Mutant("any function for a negation", LOWERING, "!negated.formula.is(formulas().negative) || ", ""),
    Mutant("what isn't at hand is computed twice", LOWERING, "return is_there(leaf) || leaf", "return true || leaf"),
    Mutant("an infinite sum's addend", INSTRUCTIONS, "x == sum ? std::copysign(0.0f, sum) : sum - x", "sum - x"),
    Mutant("the addend next to the difference", INSTRUCTIONS, "x + farther == sum ? farther : closer;", "nearest;"),
    Mutant("addends are never closer to zero", INSTRUCTIONS, "? farther : closer;", "? farther : farther;"),
    Mutant("a zero's addend has any sign", INSTRUCTIONS, "std::copysign(0.0f, sum)", "0.0f"),
    Mutant("an addend makes up for a wrong formula", FROM_HALF, "!Derivation::current->is_untried(object);", "true;"),
    Mutant("an addend under autocast", FROM_HALF, "  const Computing computing;\n  Value& value", "  Value& value"),
    Mutant("every sum by an addend", FROM_HALF, "has_its_size) == 1)", "has_its_size) >= 1)"),
    Mutant(
        "what another pass needs is let go",
        HOOK,
        "torch::autograd::get_current_graph_task_keep_graph() ||",
        "",
    ),
    Mutant("what a recipe reads stays", HOOK, "operand && operand->readers == 1 &&", "false &&"),
    Mutant(
        "what was let go of may be written to",
        VALUE,
        "  if (replaced) {\n    check_version",
        "  if (replaced && is_recipe()) {\n    check_version",
    ),
    Mutant("dead ends outlive their scope", HOOK, "dead_ends().forget();  //", "//"),
    Mutant("another node's number", SCALARS, "sum.sequence_nr == node.sequence_nr()", "true"),
    Mutant(
        "numbers of an earlier scope",
        SCALARS,
        "observed.sums = std::make_unique<Sums>();",
        "if (!observed.sums) observed.sums = std::make_unique<Sums>();",
    ),
    Mutant(
        "observing begins in a backward pass",
        SCALARS,
        "observed.scopes > 0 && torch::autograd::get_current_graph_task_id() < 0",
        "observed.scopes > 0",
    ),
    Mutant(
        "numbers in half types are added by a program",
        LOWERING,
        "return !rounds_number && set_number",
        "return set_number",
    ),
    Mutant("a number without memory", SCALARS, "|| !tensor.storage().data()", ""),
    Mutant("ops are observed for nothing", SCALARS, "(at_once || is_wanted)", "true"),
    Mutant("an addend of what is elsewhere", FROM_HALF, "value.follows_from_outside() ?", "false ?"),
    Mutant("the gradient of a part that others read", CAT, "passes_unnoticed(node_, /*has_saved=*/false, i)", "true"),
    Mutant("the gradient of a part that hooks see", CAT, "!is_hooked(*next) &&", ""),
    Mutant("the gradient of any part in float32", CAT, "(is_cast || is_upsampled)", "true"),
    Mutant("a leaf's gradient in the half type", CAT, "next->input_metadata(input_nr).grad_dtype() == half", "true"),
    Mutant("a part that begins with the first", CAT, "start += length;", ""),
    Mutant(
        "the dtype of parts is checked",
        ANSWERS,
        "answer->for_next, torch",
        "answer->for_next > 1 ? 1 : answer->for_next, torch",
    ),
    Mutant("sizes of a view", LOWERING, "lowered_.sizes = found->sizes;", ""),
    Mutant("dimensions joined for the output alone", FUSION, "continues = strides[k + 1][dim] ==", "continues = true ||"),
    Mutant("a group's statistics for all", FUSION, "geometry.strides[k + 1][1] = tensors_[k].stride(1);", ""),
    Mutant("subnormals that are flushed", FUSION, "is_on_cpu && flushes_subnormals()", "false"),
    Mutant("bits in the other order", CPU_PROGRAM, ">> (offset % kMaskBits) & 1", ">> (7 - offset % kMaskBits) & 1"),
    Mutant("a row's end is not seen", CPU_PROGRAM, "std::min(end - at, program.size[0] - coordinate[0])", "end - at"),
    Mutant(
        "the last bool is not packed", CPU_MASKS, "end - first); ++i) {\n      packed", "end - first - 1); ++i) {\n      packed"
    ),
    Mutant("a mask that was written to", PACKED_MASKS, "value_of(value).stands_for(owner)", "true"),
    Mutant("hooks give back what was written to", COMPUTING, "check_version(outside->version_given_back, &result);", ""),
    Mutant("a mask by its memory alone", PACKED_MASKS, "!is_same_counter(*value_of(value).replaced, counter)", "false"),
    Mutant("what was freed is none", OPERANDS, "value && value.is_none() && was_freed(step, name)", "false"),
    Mutant("what isn't saved is none", OPERANDS, "edge.function && value && value.is_none()", "false"),
    Mutant(
        "a part that is widened", JOIN, "value_of(operands[0]).dtype_of() == c10::typeMetaToScalarType(meta.dtype())", "true"
    ),
    Mutant("an int by way of a double", LOWERING, "PyLong_AsLongLongAndOverflow(given, &overflow)", "PyFloat_AsDouble(given)"),
    Mutant(
        "indices that somebody has",
        DERIVATION,
        "!is_held_alone(value, hook) || value.readers",
        "!value.held.defined() || value.readers",
    ),
    Mutant("indices in too few bytes", RECIPES + "rules.py", "if math.prod(plane) <= 2**16", "if True"),
    Mutant("a result in a wider dtype", COMPUTING, "if (tensor.scalar_type() != dtype)", "if (false)"),
    Mutant(
        "a view that was written to",
        DERIVATION,
        "value_of(recipe).replaced = torch::autograd::impl::version_counter(view);",
        "",
    ),
    Mutant("a mask that backward needs", PACKED_MASKS, "value_of(value).replaced =", "[[maybe_unused]] const auto unused ="),
    Mutant("a gradient that somebody has is overwritten", ANSWERS, "return grad.use_count() == 1 && ", "return "),
    Mutant("a softmax over the last dimension alone", SOFTMAX, "if (dim + 1 < grad.sizes().size()) {", "if (false) {"),
    Mutant("a place for each part that isn't read yet", SOFTMAX, "end = std::min(2 * begin, n);", "end = n;"),
    Mutant(
        "a first part that isn't read yet",
        SOFTMAX,
        ".copy_(from.narrow(0, 0, first).to(dtype))",
        ".copy_(from.narrow(0, 0, first))",
    ),
    Mutant("any gradient of twice its memory", SOFTMAX, " && ends_soon(softmax.next_edge(0))", ""),
    Mutant("hooks that see twice the memory", SOFTMAX, "while (!is_hooked(*node) && is_view()) {", "while (is_view()) {"),
    Mutant("a cast's gradient that somebody has", SOFTMAX, "is_cast && is_alone(grad)", "is_cast"),
    Mutant(
        "a cast's gradient in another layout",
        SOFTMAX,
        "is_alone(grad) && is_in_order(grad) &&",
        "is_alone(grad) &&",
    ),
    Mutant("a softmax's gradient in another layout", SOFTMAX, "!is_in_order(grad) ||", ""),
    Mutant(
        "a part of another gradient",
        SOFTMAX,
        "return grad.storage_offset() == 0 && grad.storage().nbytes() == times * grad.nbytes();",
        "return true;",
    ),
    Mutant("a base that somebody has", ANSWERS, "(!is_view || grad._base().use_count() == 1) &&", ""),
    Mutant(
        "logarithms that others have saved",
        SOFTMAX,
        "softmax->result_.retrieve_unpack_hook_data() && !value_behind(softmax->result_)",
        "false",
    ),
    Mutant("modes see a shape without memory", ANSWERS, "return c10::impl::dispatch_mode_enabled() || ", "return "),
    Mutant("hooks see a shape without memory", PARTIAL, " || is_hooked(*node)", ""),
    Mutant(
        "a shape that was written to",
        HOOK,
        "  value.check_unwritten();\n  if (const at::Tensor shape",
        "  if (const at::Tensor shape",
    ),
    Mutant("no gradient is overwritten", SOFTMAX, "if (!may_be_overwritten(is_log, in_rows)) {", "if (true) {"),
    Mutant("what only serves for its shape is computed", PARTIAL, "return is_taken ? result : at::Tensor();", "return {};"),
    Mutant("hooks outside that wait to give back a shape", PARTIAL, " || value.follows_from_outside()", ""),
    Mutant("a shape in another layout", PARTIAL, "return is_taken ? result : at::Tensor();", "return result;"),
    Mutant("signs in another layout", PARTIAL, " || grad.strides() != at::IntArrayRef(value.strides)", ""),
    Mutant("ones where a gradient passes are computed", RELU, "if (!signs.defined()) {", "if (true) {"),
    Mutant(
        "what somebody else has is let go",
        PARTIAL,
        "!is_held_alone(value_of(object), hook)",
        "!value_of(object).held.defined()",
    ),
    Mutant("what others have saved is let go", PARTIAL, "value.readers != 1 + is_of_relu || ", ""),
    Mutant("what is no larger is let go", PARTIAL, "kept >= static_cast<int64_t>(value.held.nbytes())", "false"),
    Mutant(
        "the signs of any activation",
        PARTIAL,
        "relu && kernels_take(value.held.scalar_type()) && is_saved_as(&relu->result_, object)",
        "true",
    ),
    Mutant("no ReLU's input is let go", PARTIAL, "value.readers != 1 + is_of_relu", "value.readers != 1"),
    Mutant("something follows from what was let go", OPERANDS, "!value.is_partial && ", ""),
    Mutant("a view in another order", DERIVATION, "one.is_contiguous() && other.is_contiguous() && ", ""),
    Mutant("a movement explains a write", DERIVATION, "is_movement ? 0 : 1", "is_movement ? 1 : 1"),
    Mutant("a number that is rounded in place", RECIPES + "rules.py", " or step.tensor._version > 0", ""),
    Mutant(
        "forward AD sees a shape without memory", ANSWERS, "torch::autograd::ForwardADLevel::try_get_by_idx(0) ||", "false ||"
    ),
    Mutant(
        "transforms see a shape without memory",
        ANSWERS,
        "c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)",
        "false",
    ),
    Mutant("a table of two operands", LOWERING, "recipe.operands.size() == 1 && ", ""),
    Mutant("any power", PROGRAM, "a == 2 || a == 3", "true"),
    Mutant("a nested scope forgets hooks", RECIPES + "scope.py", "around.check, around.outer,", "around.check, None,"),
]
OUTCOMES = {True: "caught", False: "all pass", None: "can't tell"}


def trial(mutant, device):
    """Whether the tests caught it, or None where they say nothing of it, and what tells."""
    with tempfile.TemporaryDirectory() as folder:
        tree, site = Path(folder, "tree"), Path(folder, "site")
        copy(tree)
        file = tree / mutant.file
        code = file.read_text()
        file.write_text(code.replace(mutant.code, mutant.broken))
        try:
            if device != "cuda":
                install(tree, site, FORCE_CPU="1", CFLAGS="-O1")
            else:
                install(tree, site, FORCE_CUDA="1", TORCH_CUDA_ARCH_LIST="{}.{}".format(*torch.cuda.get_device_capability()))
        except AssertionError:
            return None, "it doesn't build"
        options = ("-x", "-m", "cuda" if device == "cuda" else "not cuda", "-p", "no:cacheprovider")
        tests = RECOMPUTE_TESTS if device == "recompute" else TESTS
        result = run(sys.executable, "-m", "pytest", *options, *tests, cwd=tree / "tests", PYTHONPATH=str(site))
    if result.returncode < 0:
        return True, f"signal {-result.returncode}"
    failed = re.search(r"^FAILED (\S+)", result.stdout, re.MULTILINE)
    if failed:
        return True, failed[1]
    return (False if result.returncode == 0 else None), f"pytest's exit status is {result.returncode}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*ON, "recompute"])
    device = parser.parse_args().what
    mutants = [UNBROKEN, *(RECOMPUTE if device == "recompute" else [*SHARED, *ON[device]])]
    caught = {}
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
        trials = {pool.submit(trial, mutant, device): mutant for mutant in mutants}
        for done in as_completed(trials):
            mutant = trials[done]
            caught[mutant], how = done.result()
            print(f"{OUTCOMES[caught[mutant]]:<10} {mutant.file:<24} {mutant.what:<44} {how}", flush=True)
    unbroken = caught.pop(UNBROKEN)
    print(f"{sum(map(bool, caught.values()))} of {len(caught)} mutants caught; with nothing broken: {OUTCOMES[unbroken]}")
    sys.exit(0 if unbroken is False and all(caught.values()) else 1)


if __name__ == "__main__":
    main()
