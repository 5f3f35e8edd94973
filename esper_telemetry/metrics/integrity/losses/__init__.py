"""Equations of the losses, and of the minibatches that they are taken over."""
