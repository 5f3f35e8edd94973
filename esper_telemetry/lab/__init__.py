"""Faults injected on purpose and networks that grow: built on the public extension points."""
