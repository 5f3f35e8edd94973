"""Values derived from the history of records: plain numbers and NumPy, no torch."""
