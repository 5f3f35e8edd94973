"""Values derived from earlier records of a run: averages, drifts, trends, outliers, health of gradients. NumPy, no torch.

A resumed run restores this state from its journal: it is a function of the records, so checkpoints do not store it.
"""
