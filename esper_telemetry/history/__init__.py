"""Values derived from earlier records of a run: averages, drifts, trends, outliers, health of gradients. NumPy, no torch.

A resumed run reads its journal to learn this state again: it is a function of the records, so no checkpoint stores it.
"""
