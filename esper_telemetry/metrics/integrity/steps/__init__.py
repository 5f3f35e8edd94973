"""Equations of a gradient step: gradient, clipping, and the optimizer's change of the weights."""
