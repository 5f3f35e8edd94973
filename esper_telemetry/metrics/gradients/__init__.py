"""Gradients of a model: norms, health, directions, concentration, noise, and the interference of actor and critic."""
