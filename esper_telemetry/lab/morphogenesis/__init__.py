"""Morphogenesis: an environment in which a controller adds modules, called seeds, to networks while these are trained."""
