"""Values derived from earlier records of a run: averages, drifts, trends, outliers, health of gradients. NumPy, no torch."""
