"""Recipes: what follows from values that autograd keeps anyway isn't saved but computed again, to the same bits.

``values`` is what stands for a tensor, ``rules`` says from what and how an op's output follows, ``norms`` are the formulas of
normalisations, ``verification`` chooses among formulas, and ``scope`` brings them together in autograd's hooks.
"""

from activations_cuda.recipes.scope import recompute

__all__ = ["recompute"]
