"""What a check of an equation says about numbers that differ from it."""

from esper_telemetry.equations.comparison import EquationCheck


def names(result: EquationCheck) -> set[str]:
    """Return the hypotheses that explain the numbers."""
    return {one.hypothesis.name for one in result.explanations}
