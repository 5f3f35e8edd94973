"""Metrics of morphogenesis: hosts, the seeds in them, and their environments."""
