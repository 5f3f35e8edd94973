"""Values, metric declarations, metric groups and their reductions, on which all other packages are built."""
