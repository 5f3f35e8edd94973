"""Values, metric declarations, metric groups and their reductions: what every other package is built on."""
