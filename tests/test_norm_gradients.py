"""The gradients of a batch norm in half types, which kernels of ours compute in the scope: PyTorch's bits."""

import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from activations_cuda import _C, recompute
from activations_cuda.recipes.verification import is_identical
from answers import (
    check_captured,
    check_second_derivatives,
    check_several_passes,
    check_several_threads,
    check_within_hooks_that_give_back_once,
    gradients,
    kernels,
)

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_hidden_errors")]

LAYOUTS = {2: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}
# Rows that fill no block, one, or all; channels that fill no tile, one and a half, or many; one row a thread, and one in all.
SHAPES = (
    (64, 8, 56, 56),
    (16, 24, 33, 31),
    (3, 40, 5, 7),
    (2, 8, 3, 3),
    (16, 1152, 7, 7),
    (128, 16, 1, 1),
    (1, 16, 1, 2),
    (5000, 48),
    (7, 64),
    (2, 16, 5, 6, 7),
)
# Contiguous: planes in vectors or not, of fewer elements than a warp, or more than a block; samples that fill no block.
PLANES = (
    (64, 8, 56, 56),
    (16, 24, 33, 31),
    (3, 40, 7, 7),
    (7, 6, 8, 16),
    (5, 9, 16, 16),
    (5, 3, 200, 202),
    (513, 7, 2, 2),
    (16, 1152, 7, 7),
    (1, 16, 1, 2),
    (33, 6, 1, 257),
    (6, 10, 77),
    (9, 16, 1),
    (5, 1, 77),
    ((1 << 20) + 3, 2, 2),
    (3, 7, 4, 5, 6),
)

# Behind the norm: nothing, PyTorch's ReLU, and an activation that has a mask.
alone_or_not = pytest.mark.parametrize("behind", [None, torch.relu_, _C.relu6_], ids=["alone", "relu", "mask"])


class Norm(nn.Module):
    """A batch norm of a leaf, whose output is scaled by what looks like the next layer's gradient."""

    def __init__(self, shape, dtype=torch.bfloat16, weights=torch.float32, affine=True, behind=None, layout=None):
        super().__init__()
        self.behind = behind
        torch.manual_seed(0)
        layout = layout or LAYOUTS[len(shape)]
        channels = shape[1]
        self.x = nn.Parameter((torch.randn(shape, device="cuda") * 2 + 0.3).to(dtype).contiguous(memory_format=layout))
        self.grad = nn.Parameter(torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=layout))
        self.weight, self.bias = (
            nn.Parameter(torch.randn(channels, device="cuda").to(weights)) if affine else None for _ in range(2)
        )

    def normalized(self):
        return F.batch_norm(self.x, None, None, self.weight, self.bias, training=True)

    def forward(self):
        return (self.normalized() if self.behind is None else self.behind(self.normalized())) * self.grad

    def leaves(self):
        return [leaf for leaf in (self.x, self.weight, self.bias, self.grad) if leaf is not None and leaf.requires_grad]


def is_ours(names, behind):
    """Whether our kernel is among them, and no activation's, which it computes as well."""
    of_activations = "threshold", "::backward_kernel"
    has_others = behind and any(other in name for name in names for other in of_activations)
    return any("sum_kernel" in name for name in names) and not has_others


def check(norm, expected_is_ours=True):
    expected = gradients(norm)
    for _ in range(3):
        found, names = kernels(lambda: gradients(norm, recompute()))
        assert all(map(is_identical, found, expected))
        assert [each.stride() for each in found] == [each.stride() for each in expected]
    assert is_ours(names, norm.behind) == expected_is_ours


@alone_or_not
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_are_the_ops(shape, weights, behind):
    check(Norm(shape, weights=weights, behind=behind))


@alone_or_not
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", PLANES)
def test_the_bits_are_the_ops_where_planes_are_innermost(shape, weights, behind):
    check(Norm(shape, weights=weights, behind=behind, layout=torch.contiguous_format))


either_layout = pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=["channels", "planes"])


@alone_or_not
@either_layout
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_float16_by_native_kernels(shape, layout, behind):
    check(Norm(shape, torch.float16, torch.float16, behind=behind, layout=layout))
    with torch.backends.cudnn.flags(enabled=False):
        check(Norm(shape, torch.float16, behind=behind, layout=layout))


@alone_or_not
@either_layout
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("special", [math.nan, math.inf, -0.0, 1e-40, 3e-8, 3e38])
def test_special_numbers(special, dtype, layout, behind):
    norm = Norm((3, 16, 9, 11), dtype, dtype, behind=behind, layout=layout)
    with torch.no_grad():
        norm.x[0, 1, 2, 3] = norm.grad[0, 2, 2, 3] = norm.weight[3] = special
        norm.x[:, 4] = norm.grad[:, 5] = special
        norm.weight[6:9] = special  # the output is close to 0 for some, or rounded to it
        norm.bias[6:9] = torch.tensor([0, special, -special])
    check(norm)


@alone_or_not
@either_layout
def test_a_mean_that_overflows(layout, behind):
    norm = Norm((3, 16, 9, 11), behind=behind, layout=layout)
    with torch.no_grad():
        norm.x[:, :8, ::2] = 3e38
        norm.x[:, :8, 1::2] = -3e38
        norm.x[:, 8:10] = 3e38  # whose sum overflows, but no deviation
        norm.grad.abs_()
    check(norm)


def test_other_slopes():
    norm = Norm((8, 16, 9, 11), behind=lambda y: _C.leaky_relu_(y, 0.1))
    expected = gradients(norm)
    for _ in range(2):
        assert all(map(is_identical, gradients(norm, recompute()), expected))


def test_an_output_that_was_written_to_raises():
    norm = Norm((8, 16, 9, 11), behind=torch.relu_)
    check(norm)
    with recompute():
        y = norm.normalized().relu_()
        other = y * norm.grad.detach()  # whose node doesn't save y
        _ = y * norm.grad  # saves y
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(other.sum(), norm.leaves()[:3])


@alone_or_not
@either_layout
def test_a_zero_weight_tells_nothing(layout, behind):
    norm = Norm((8, 32, 9, 11), behind=behind, layout=layout)
    with torch.no_grad():
        norm.weight.zero_()
    check(norm)
    with torch.no_grad():
        norm.weight.normal_()
    check(norm)


@pytest.mark.parametrize("needed", [["x"], ["weight"], ["bias"], ["x", "bias"]], ids="+".join)
@pytest.mark.parametrize("of_grad", [torch.channels_last, torch.contiguous_format])
@either_layout
@pytest.mark.parametrize("affine", [True, False])
@alone_or_not
def test_some_gradients(needed, layout, of_grad, affine, behind):
    norm = Norm((8, 16, 9, 11), affine=affine, behind=behind, layout=layout)
    norm.grad.data = norm.grad.data.contiguous(memory_format=of_grad)
    leaves = list(map(norm.get_parameter, needed if affine else ["x"]))

    def found(scope):
        with scope:
            loss = norm().sum()
        return torch.autograd.grad(loss, leaves)

    expected = found(torch.enable_grad())
    for _ in range(2):
        assert all(map(is_identical, found(recompute()), expected))


def test_where_the_op_takes_another_way():
    check(Norm((8, 12, 9, 11)), expected_is_ours=False)  # no vectors of 8
    check(Norm((8, 16, 9, 11), affine=False), expected_is_ours=False)
    check(Norm((8, 16, 9, 11), torch.float32), expected_is_ours=False)
    for layout, other in (torch.channels_last, torch.contiguous_format), (torch.contiguous_format, torch.channels_last):
        mixed = Norm((8, 16, 9, 11), layout=layout)
        mixed.grad.data = mixed.grad.data.contiguous(memory_format=other)
        check(mixed, expected_is_ours=False)
        shifted = Norm((8, 16, 9, 11), layout=layout)
        part = shifted.x.data.new_empty(shifted.x.numel() + 1)[1:]
        shifted.x.data = part.as_strided(shifted.x.shape, shifted.x.stride(), 1).copy_(shifted.x.data)
        check(shifted, expected_is_ours=False)
    check(Norm((8, 1, 9, 11), layout=torch.contiguous_format), expected_is_ours=False)  # which is channels-last, too
    check(Norm((8, 16, 9, 11), torch.float16, layout=torch.contiguous_format), expected_is_ours=False)  # by cuDNN


def test_strides_of_dimensions_of_one():
    """They may be anything, and the op's results have others."""
    for strides in (2048, 64, 8, 1), (1024, 64, 1, 1), (7, 64, 8, 1):
        norm = Norm((1, 16, *((8, 8) if strides[2] == 8 else (64, 1))), layout=torch.contiguous_format)
        norm.x.data = norm.x.data.new_empty(2048).as_strided(norm.x.shape, strides).copy_(norm.x.data)
        check(norm)


@pytest.mark.parametrize("first", [0, 1])
def test_the_strides_of_a_single_channel(first):
    """By which the op chooses one way to add up or the other."""
    length = 5000 + first
    norms = [Norm((16, 1, length), layout=torch.contiguous_format) for _ in range(2)]
    norms[0].x.data = norms[0].x.data.as_strided(norms[0].x.shape, (length, 1, 1))
    for i in (first, 1 - first):
        check(norms[i], expected_is_ours=i == 1)


@alone_or_not
@either_layout
@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_what_needs_no_gradient_gets_none(frozen, layout, behind):
    norm = Norm((8, 16, 9, 11), behind=behind, layout=layout)
    norm.get_parameter(frozen).requires_grad_(False)
    check(norm, expected_is_ours=frozen != "x")  # the op then takes one pass, too


@alone_or_not
@either_layout
def test_more_than_one_pass(layout, behind):
    check_several_passes(Norm((8, 16, 9, 11), behind=behind, layout=layout))


@alone_or_not
@either_layout
def test_second_derivatives(layout, behind):
    check_second_derivatives(Norm((4, 16, 5, 7), behind=behind, layout=layout))


def test_hooks_see_what_they_would():
    def seen(scope):
        found = []
        with scope:
            y = norm.normalized()
            y * norm.grad
        y.grad_fn.register_prehook(lambda grads: found.append(grads[0]) or (grads[0] * 2, *grads[1:]))
        y.grad_fn.register_hook(lambda results, grads: found.extend([*results, grads[0]]))
        y.register_hook(lambda grad: found.append(grad) or grad * 3)
        y.backward(norm.grad)
        return found

    norm = Norm((4, 16, 5, 7))
    gradients(norm, recompute())
    expected = seen(torch.enable_grad())
    found = seen(recompute())
    assert len(found) == len(expected) == 6
    assert all(map(is_identical, found, expected))


@alone_or_not
def test_what_is_written_to_raises(behind):
    norm = Norm((4, 16, 5, 7), behind=behind)
    x = norm.x * 1
    with recompute():
        y = F.batch_norm(x, None, None, norm.weight, norm.bias, training=True)
        y = y if behind is None else behind(y)
        other = y * norm.grad.detach()  # whose node doesn't save y
        _ = y * norm.grad  # saves y
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward()
    check(norm)  # nothing is left behind


@alone_or_not
@pytest.mark.parametrize("channels, shift", [(12, 0), (16, 0), (16, 1)])
def test_within_hooks_that_give_back_once(channels, shift, behind):
    norm = Norm((64, channels, 32, 32), behind=behind)

    def normalized():  # of no leaf, which those hooks needn't get; shifted, it isn't aligned
        x = torch.cat([norm.x.new_zeros(shift), norm.x.permute(0, 2, 3, 1).flatten()])[shift:]
        x = x.view(64, 32, 32, channels).permute(0, 3, 1, 2)
        return F.batch_norm(x, None, None, norm.weight, norm.bias, training=True)

    norm.normalized = normalized
    check_within_hooks_that_give_back_once(norm)


def test_a_tangent_of_the_gradient():
    norm = Norm((8, 16, 9, 11), behind=torch.relu_)
    tangent = torch.randn_like(norm.grad)

    def found(scope):
        with torch.autograd.forward_ad.dual_level():
            with scope:
                y = norm.normalized().relu_()
                y * norm.grad  # saves y
                loss = (y * torch.autograd.forward_ad.make_dual(norm.grad.detach(), tangent)).sum()
            results = torch.autograd.grad(loss, [norm.x, norm.weight, norm.bias])
            return [part for each in results for part in torch.autograd.forward_ad.unpack_dual(each)]

    expected = found(torch.enable_grad())
    assert all(part is not None for part in expected)
    for _ in range(2):
        assert all(map(is_identical, found(recompute()), expected))


def test_a_tangent_of_the_bias():
    norm = Norm((8, 16, 9, 11), behind=torch.relu_)
    check(norm)

    def found(scope):
        with torch.autograd.forward_ad.dual_level():
            with scope:
                bias = torch.autograd.forward_ad.make_dual(norm.bias, torch.ones_like(norm.bias))
                y = F.batch_norm(norm.x, None, None, norm.weight, bias, training=True).relu_()
                _ = y * norm.grad  # saves y
                loss = (y * norm.grad.detach()).sum()
            return [each.clone() for each in torch.autograd.grad(loss, [norm.x, norm.weight, norm.bias])]

    expected = found(torch.enable_grad())
    for _ in range(2):
        assert all(map(is_identical, found(recompute()), expected))


def test_a_tangent_of_the_input():
    norm = Norm((8, 16, 9, 11), weights=torch.bfloat16)
    tangent = torch.randn_like(norm.x)

    def found(scope):
        with torch.autograd.forward_ad.dual_level():
            with scope:
                x = torch.autograd.forward_ad.make_dual(norm.x, tangent)
                y = F.batch_norm(x, None, None, norm.weight, norm.bias, training=True)
                loss = (y * norm.grad).sum()
            results = torch.autograd.grad(loss, [norm.x, norm.weight, norm.bias])
            return [part for each in results for part in torch.autograd.forward_ad.unpack_dual(each) if part is not None]

    try:
        expected = found(torch.enable_grad())
    except RuntimeError as error:
        pytest.skip(str(error))
    for _ in range(2):
        results = found(recompute())
        assert len(results) == len(expected)
        assert all(map(is_identical, results, expected))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="parameters have no dtype for gradients yet")
def test_a_gradient_in_another_dtype():
    norm = Norm((8, 16, 9, 11), weights=torch.bfloat16)
    norm.weight.grad_dtype = torch.float32
    for scope in (torch.enable_grad(), recompute(), recompute()):
        norm.weight.grad = None
        with scope:
            loss = norm().sum()
        loss.backward()
        assert norm.weight.grad.dtype == torch.float32


def test_a_relu_in_another_stream():
    norm = Norm((64, 64, 32, 32), behind=torch.relu_)
    expected = gradients(norm)
    stream = torch.cuda.Stream()
    for _ in range(3):
        with recompute():
            y = norm.normalized()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                y.relu_()
            torch.cuda.current_stream().wait_stream(stream)
            loss = (y * norm.grad).sum()
        found, names = kernels(lambda loss=loss: torch.autograd.grad(loss, norm.leaves()))
        assert all(map(is_identical, found, expected))
    assert any("threshold" in name for name in names)


@pytest.mark.parametrize("behind", [torch.relu, _C.relu6], ids=["relu", "mask"])
def test_an_activation_out_of_place_whose_input_is_gone(behind):
    check(Norm((8, 16, 9, 11), behind=behind))


@alone_or_not
def test_several_threads(behind):
    check_several_threads([Norm((32, 32, 16, 16), behind=behind) for _ in range(4)])


@alone_or_not
def test_one_graph_in_several_threads(behind):
    norm = Norm((32, 32, 16, 16), behind=behind)
    expected = gradients(norm)
    with recompute():
        loss = norm().sum()
    found = []
    run = lambda: found.extend(torch.autograd.grad(loss, norm.leaves(), retain_graph=True) for _ in range(20))  # noqa: E731
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    assert all(is_identical(*pair) for each in found for pair in zip(each, expected, strict=True))


@alone_or_not
@either_layout
def test_a_captured_graph(layout, behind):
    norm = Norm((8, 16, 9, 11), behind=behind, layout=layout)
    check(norm)
    assert is_ours(check_captured(norm), behind)


@alone_or_not
def test_anomalies_are_found_where_they_are(behind):
    norm = Norm((8, 16, 9, 11), behind=behind)
    gradients(norm, recompute())
    norm.grad.requires_grad_(False)  # or the product's own would be the first
    with torch.no_grad():
        norm.x[0, 0, 0, 0] = math.nan
    with recompute():
        y = norm.normalized() if behind is None else behind(norm.normalized())
        _ = y * norm.x  # saves y
        loss = (y * norm.grad).sum()
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="BatchNormBackward0' returned nan values"):
        loss.backward()


@pytest.mark.parametrize(
    "layout, width, behind",
    [
        (torch.channels_last, 1460, torch.relu_),
        (torch.contiguous_format, 1460, torch.relu_),
        (torch.contiguous_format, 1459, _C.relu6_),
    ],
    ids=["channels", "planes", "mask"],
)
@pytest.mark.usefixtures("most_memory")
def test_beyond_32_bits(layout, width, behind):
    """Addresses in bytes. The elements are fewer than 2^31, as for the op's own kernels."""
    check(Norm((8, 64, 1459, width), behind=behind, layout=layout))


def test_a_bias_that_was_written_to_raises():
    norm = Norm((8, 16, 9, 11), behind=torch.relu_)
    check(norm)
    with recompute():
        y = norm.normalized().relu_()
        other = y * norm.grad.detach()  # whose node doesn't save y
        _ = y * norm.grad  # saves y
    with torch.no_grad():
        norm.bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward()


def of_norms_output(read):
    """What `read(norm, scope)` returns is the same in the scope, and without."""
    norm = Norm((8, 16, 9, 11), behind=torch.relu_)
    check(norm)
    expected = read(norm)
    for _ in range(2):
        found = read(norm, recompute())
        assert len(found) == len(expected)
        assert all(map(is_identical, found, expected))


@pytest.mark.parametrize("part", [slice(None), slice(1, None)], ids=["whole", "view"])
def test_another_reader_of_the_norms_output(part):
    def read(norm, scope=None):
        with scope or torch.enable_grad():
            z = norm.normalized()
            view = z if part == slice(None) else z[part]
            other = view * 2
            loss = (z.relu_() * norm.grad).sum() + other.sum()
        return torch.autograd.grad(loss, norm.leaves())

    of_norms_output(read)


def test_a_relu_out_of_place():
    def read(norm, scope=None):
        with scope or torch.enable_grad():
            z = norm.normalized()
            loss = (z.relu() * norm.grad).sum()
        return torch.autograd.grad(loss, [z, *norm.leaves()])

    of_norms_output(read)


def test_hooks_on_the_norms_output():
    def read(norm, scope=None):
        seen = []
        with scope or torch.enable_grad():
            z = norm.normalized()
            z.register_hook(lambda grad: seen.append(grad) or grad * 2)
            y = z.relu_()
            loss = (y * norm.grad).sum()
        y.register_hook(lambda grad: seen.append(grad))
        return [*torch.autograd.grad(loss, norm.leaves()), *seen]

    of_norms_output(read)


def test_hooks_on_the_activations_node():
    def read(norm, scope=None):
        seen = []
        with scope or torch.enable_grad():
            y = norm.normalized().relu_()
            loss = (y * norm.grad).sum()
        y.grad_fn.register_hook(lambda results, grads: seen.extend([*results, *grads]))
        return [*torch.autograd.grad(loss, norm.leaves()), *seen]

    of_norms_output(read)


def test_a_pass_that_begins_at_the_norm_as_well():
    def read(norm, scope=None):
        with scope or torch.enable_grad():
            y = norm.normalized().relu_()
            loss = (y * norm.grad).sum()
        edge = torch.autograd.graph.GradientEdge(*y.grad_fn.next_functions[0], None)
        return torch.autograd.grad([loss, edge], norm.leaves(), [None, norm.grad.detach()])

    of_norms_output(read)


def test_a_gradient_of_the_norms_output():
    def read(norm, scope=None):
        with scope or torch.enable_grad():
            y = norm.normalized().relu_()
            loss = (y * norm.grad).sum()
        edge = torch.autograd.graph.GradientEdge(*y.grad_fn.next_functions[0], None)
        return torch.autograd.grad(loss, [edge, *norm.leaves()])

    of_norms_output(read)


def test_retained_gradients():
    def read(norm, scope=None):
        with scope or torch.enable_grad():
            z = norm.normalized()
            z.retain_grad()
            y = z.relu_()
            loss = (y * norm.grad).sum()
        found = torch.autograd.grad(loss, norm.leaves(), retain_graph=True)
        loss.backward()
        return [*found, *([] if z.grad is None else [z.grad])]

    of_norms_output(read)


def test_two_pairs_in_one_graph():
    """Each norm gets its own ReLU's results, whatever the order in which the nodes run."""
    norms = [Norm((8, 16, 9, 11), behind=torch.relu_) for _ in range(3)]
    leaves = [leaf for norm in norms for leaf in norm.leaves()]

    def found(scope):
        with scope:
            loss = sum(norm().sum() * (i + 1) for i, norm in enumerate(norms))
        return torch.autograd.grad(loss, leaves)

    expected = found(torch.enable_grad())
    for _ in range(3):
        assert all(map(is_identical, found(recompute()), expected))


def test_a_pass_that_fails_leaves_nothing():
    """Between the activation's node and the norm's: a hook raises there."""
    norm = Norm((8, 16, 9, 11), behind=torch.relu_)
    check(norm)
    expected = gradients(norm)
    is_to_fail = True

    def fail(grad):
        if is_to_fail:
            raise ValueError("on purpose")

    with recompute():
        z = norm.normalized()
        between = norm.x * 2  # whose node runs after the activation's, which comes later, and before the norm's
        between.register_hook(fail)
        loss = (z.relu_() * norm.grad).sum() + between.sum()
    with pytest.raises(ValueError, match="on purpose"):
        torch.autograd.grad(loss, norm.leaves(), retain_graph=True)
    is_to_fail = False
    found = torch.autograd.grad(loss, norm.leaves())
    assert is_identical(found[0], expected[0] + 2)
    assert all(map(is_identical, found[1:], expected[1:]))


def test_under_compiled_autograd():
    norm = Norm((8, 16, 9, 11), behind=torch.relu_)
    expected = gradients(norm)
    for _ in range(2):
        with recompute():
            loss = norm().sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        for leaf, each in zip(norm.leaves(), expected, strict=True):
            assert is_identical(leaf.grad, each)
            leaf.grad = None
