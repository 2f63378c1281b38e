"""Packed activations in compiled graphs, where they stand alone: a pass for Inductor.

Under torch.compile an activation is a handful of ATen ops, which Inductor fuses with their neighbors. Between two matrix
products there is nothing to fuse with, and the kernels that save one bit per element take less time and memory. Those of the
smooth activations in bfloat16 and float16 save the output, which the second product saves anyway, and a code, and Inductor
would save the input too::

    from activations_cuda import inductor

    step = torch.compile(model, options=inductor.options())

An activation of this package stays packed where Inductor gives each of its neighbors, forward and backward, a kernel of its
own. Everywhere else the graph is what it is without the pass.
"""

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.operator_schemas import normalize_function
from torch.fx.traceback import preserve_node_meta

from activations_cuda import _C

__all__ = ["options"]

aten, fastact = torch.ops.aten, torch.ops.fastact


def named(op_name):
    """An op's packet, and its overloads."""
    packet = getattr(fastact, op_name)
    return packet, *(getattr(packet, overload) for overload in packet.overloads())


# Backward of the others reads their output, which the next layer mostly saves: the mask is pure overhead.
FAMILY = {name: member for name, member in _C.family.items() if member.pytorch_saves == "input"}
INPLACE = {op for name in FAMILY for op in named(f"{name}_")}
TO_PACKED = {op: named(member.packed_op)[0] for name, member in FAMILY.items() for op in (*named(name), *named(f"{name}_"))}
FROM_PACKED = {op: named(name)[0] for name, member in FAMILY.items() for op in named(member.packed_op)}
WITH_CODE = {op for member in FAMILY.values() if member.saves_output for op in named(member.packed_op)}
BACKWARD = {fastact.masked_scale.default, fastact.code_backward.default}

# What Inductor calls a library for.
CONVOLUTIONS = {aten.convolution, aten.convolution_backward}
EXTERN = CONVOLUTIONS | {
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_cudnn_attention_backward,
}


class Pass(CustomGraphPass):
    def uuid(self) -> bytes:
        return get_hash_for_files((__file__, _C.__file__))


class Pack(Pass):
    """Before autograd traces the graph: every activation becomes the op that returns its mask, or its code, too."""

    def __call__(self, graph: Graph) -> None:
        values: Counter[int] = Counter()  # how many there are so far, by their storage
        for node in list(graph.nodes):
            value = node.meta.get("example_value")
            if node.target in TO_PACKED:
                pack(node, values)
            if is_plain(value):
                values[storage(value)] += 1


class Unpack(Pass):
    """Once forward and backward are one graph: what doesn't stand alone becomes the ATen ops that Inductor fuses."""

    def __call__(self, graph: Graph) -> None:
        backward = backward_of(graph)
        for node in list(graph.nodes):
            if node.target in FROM_PACKED:
                uses = [use for bits in items(node, 1) for use in bits.users]
                if all(use.target in BACKWARD for use in uses) and not stands_alone(node, uses, backward):
                    unpack(node, uses)


class Chain(CustomGraphPass):
    """Several passes where Inductor has room for one."""

    def __init__(self, *passes: Callable[[Graph], None]) -> None:
        self.passes = passes

    def __call__(self, graph: Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """None, and the graph isn't cached, where one of the passes has none."""
        uuids = tuple(each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes)
        return None if None in uuids else uuids


def is_plain(value):
    """Whether it is a tensor with memory of its own, and not a subclass's or a functorch transform's."""
    return isinstance(value, FakeTensor) and value.layout == torch.strided


def storage(value):
    return value.untyped_storage()._cdata


def pack(node, values):
    graph, op = node.graph, TO_PACKED[node.target]
    normalized = normalize_function(node.target, node.args, node.kwargs)  # with the defaults, which op hasn't
    if normalized is None:
        return
    (input, *parameters), named = normalized
    value = input.meta.get("example_value")
    if not is_plain(value) or len(node.all_input_nodes) > 1:
        return  # a tensor subclass, a functorch transform, or parameters that are computed
    if node.target in INPLACE:
        # Memory that nothing else sees needn't be written to.
        is_temporary = input.op not in ("placeholder", "get_attr") and len(input.users) == 1 and values[storage(value)] == 1
        if not is_temporary:
            return
    try:
        with value.fake_mode, torch.no_grad():
            op(value, *parameters, **named)
        if op in WITH_CODE:
            ask_pytorch(op, value, *parameters, **named)
    except (NotImplementedError, ValueError):
        return  # it is for PyTorch's op to answer
    with graph.inserting_before(node):
        packed = graph.call_function(op, (input, *parameters), named)
        output = graph.call_function(operator.getitem, (packed, 0))
    output.meta = node.meta
    node.replace_all_uses_with(output)
    graph.erase_node(node)


def ask_pytorch(op, like, *parameters, **named):
    """Raise NotImplementedError where PyTorch's gradient isn't what a code gives, which only real tensors show."""
    if not torch.get_device_module(like.device).is_available():
        raise NotImplementedError
    with unset_fake_temporarily(), torch.no_grad():
        op(torch.empty(1, dtype=like.dtype, device=like.device), *parameters, **named)


def is_view(node):
    return isinstance(node.target, OpOverload) and node.target.is_view


def source(node):
    """What a node is a view of."""
    while is_view(node):
        node = node.args[0]
    return node


def readers(node):
    """The nodes that read a node, directly or through views."""
    for user in node.users:
        if is_view(user):
            yield from readers(user)
        else:
            yield user


def computed_by(node):
    """The node whose kernel a value comes from."""
    return node.args[0] if node.target is operator.getitem else node


def is_any_of(node, packets):
    return getattr(computed_by(node).target, "overloadpacket", None) in packets


def is_separate(node):
    """Whether a node is a kernel of its own, or lies beyond this graph."""
    return computed_by(node).op in ("placeholder", "output") or is_any_of(node, EXTERN)


def is_fused(node):
    """Whether Inductor adds a bias to the node's value itself, as it does to a convolution's on a GPU."""
    return is_any_of(node, {aten.convolution}) and node.args[2] is not None and node.meta["val"].is_cuda


def is_channels_last(value):
    return value.dim() != 4 or value.is_contiguous(memory_format=torch.channels_last)


def items(node, index):
    return [user for user in node.users if user.args[1] == index]


def backward_of(graph):
    """The nodes that depend on a gradient."""
    nodes = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in node.target
        if is_tangent or not nodes.isdisjoint(node.all_input_nodes):
            nodes.add(node)
    return nodes


def stands_alone(packed, uses, backward):
    """Whether each neighbor of an activation, and of the `uses` of its mask or code, has a kernel of its own."""
    if not uses or config.max_autotune or config.max_autotune_gemm:
        return False  # nobody needs the mask; Inductor may write the kernels around it itself
    input = source(packed.args[0])
    if is_fused(input) or input.op == "placeholder" or list(readers(input)) != [packed]:
        return False  # whoever else has the input saves it
    grads = [source(use.args[0]) for use in uses]
    of_output = [reader for output in items(packed, 0) for reader in readers(output) if reader not in uses]
    if packed.target in WITH_CODE and backward.isdisjoint(of_output):
        return False  # nobody else saves the output
    around = [input, *grads, *of_output, *(reader for grad in grads for reader in readers(grad))]
    if any(is_any_of(node, CONVOLUTIONS) for node in around) and not is_channels_last(input.meta["val"]):
        return False  # Inductor may choose that layout, and the packed ops keep to the one that was traced
    return all(is_separate(node) or node in uses for node in around) and all(map(leaves_alone, uses))


def leaves_alone(use):
    """Whether a gradient is read by separate kernels, or summed beside one, for a bias.

    A sum can be fused, but what it saves is the reading of a tensor that is there anyway, and so do the bits.
    """
    others = [reader for reader in readers(use) if not is_separate(reader)]
    return len(others) < len(list(readers(use))) and all(reader.target is aten.sum.dim_IntList for reader in others)


def unpack(packed, uses):
    op, (input, *_) = FROM_PACKED[packed.target], packed.args
    named = {argument.name: value for argument, value in zip(packed.target._schema.arguments[1:], packed.args[1:], strict=True)}

    def forward_backward(input, *grads):
        output = op(input, **named)
        return output, *(torch.autograd.grad(output, input, grad, retain_graph=True)[0] for grad in grads)

    value = input.meta["val"]
    with value.fake_mode, torch.enable_grad(), preserve_node_meta():
        grads = [use.args[0].meta["val"] for use in uses]
        trace = make_fx(forward_backward, decomposition_table=select_decomp_table())
        traced = trace(value.detach().requires_grad_(bool(grads)), *grads).graph

    origins = dict(zip(traced.find_nodes(op="placeholder"), (packed, *uses), strict=True))
    copies = {node: origin.args[0] for node, origin in origins.items()}
    for node in traced.nodes:
        if node.op == "call_function":
            # What depends on a gradient belongs to the backward pass.
            origin = next((origins[n] for n in node.all_input_nodes if origins[n] is not packed), packed)
            with origin.graph.inserting_before(origin):
                copies[node] = origin.graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {key: value for key, value in origin.meta.items() if key != "eager_input_vals"} | node.meta
            origins[node] = origin

    graph = packed.graph
    output, *gradients = (copies[node] for node in traced.output_node().args[0])
    for use, gradient in zip(uses, gradients, strict=True):
        use.replace_all_uses_with(gradient)
        graph.erase_node(use)
    for item in list(packed.users):
        item.replace_all_uses_with(output)  # a mask or code has no more users
        graph.erase_node(item)
    graph.erase_node(packed)


def options(others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The options that make torch.compile leave activations packed where they stand alone.

    They are for ``torch.compile(model, options=...)`` or ``torch._inductor.config.patch(...)``. A pass of ``others`` or of
    Inductor's configuration runs before the one that takes its place here. Under ``max_autotune`` nothing stands alone, since
    Inductor may write any of the kernels around, and fuse.

    Args:
        others: further options of Inductor's; of a mode, ``torch._inductor.list_mode_options(mode)``.

    Returns:
        ``others`` and the two passes, ``pre_grad_custom_pass`` and ``joint_custom_pre_pass``.
    """
    if not isinstance(others, (Mapping, type(None))):
        raise TypeError(f"inductor.options: expected a dict of options, got {type(others).__name__}")
    others = dict(others or {})
    if hasattr(config, "pre_grad_pass_timing"):  # torch 2.11 has none
        others["pre_grad_pass_timing"] = "early"  # in every process, cached code or not: PyTorch is asked
    for place, ours in {"pre_grad_custom_pass": Pack(), "joint_custom_pre_pass": Unpack()}.items():
        theirs = others.get(place, getattr(config, place)) or ()
        theirs = tuple(theirs) if isinstance(theirs, (list, tuple)) else (theirs,)
        others[place] = Chain(*theirs, ours) if theirs else ours
    return others
