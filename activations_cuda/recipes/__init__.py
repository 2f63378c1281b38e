"""Recipes: what follows from values that autograd keeps anyway isn't saved but computed again, to the same bits.

``rules`` says from what and how an op's output follows, by what a ``step`` shows of its node; ``norms`` are the formulas of
normalizations; ``verification`` chooses among formulas; ``hook`` is what autograd calls, whose quick half is
csrc/binding/recipes; ``scope`` is the context manager.
"""

from activations_cuda.recipes.scope import recompute

__all__ = ["recompute"]
