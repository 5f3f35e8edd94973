"""The comparison of numbers with an equation, and the hypotheses that explain a difference."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from explained import names
from mistakes.corpus import BY_NAME
from torch import Tensor

from esper_telemetry.equations.comparison import EquationCheck, compare
from esper_telemetry.equations.equation import Equation, Hypothesis, equations


@dataclass(frozen=True)
class Factors:
    left: Tensor
    right: Tensor


def fitted_factor(inputs: Factors, numbers: Tensor) -> tuple[float, Tensor]:
    """Least squares over every second row."""
    product = inputs.left * inputs.right
    factor = float((product[::2] @ numbers[::2]) / (product[::2] @ product[::2]))
    return factor, factor * product


PRODUCT = Equation(
    name="product",
    quantity="the products",
    equation="p = a b",
    compute=lambda inputs: inputs.left * inputs.right,
    hypotheses=(
        Hypothesis(
            "sum", "sums of the factors", "p = a + b", lambda inputs: inputs.left + inputs.right, source="a schoolbook", advice="Multiply."
        ),
        Hypothesis("difference", "differences", "p = a - b", lambda inputs: inputs.left - inputs.right, variant=True),
        Hypothesis("absent", "something that needs more", "p = c", lambda inputs: None),
        Hypothesis("factor", "products times a factor", "p = c a b", fit=fitted_factor, parameter="c"),
    ),
    source="arithmetic",
    inputs="two factors",
)
FACTORS = Factors(torch.tensor([1.0, 2.0, 3.0, 5.0]).double(), torch.tensor([2.0, 0.5, 4.0, 1.0]).double())


def check(numbers: Tensor) -> EquationCheck:
    return compare(PRODUCT, FACTORS, numbers, magnitudes=FACTORS.__dict__.values())


def test_numbers_that_equal_their_equation_match() -> None:
    result = check(torch.tensor([2.0, 1.0, 12.0, 5.0]))

    assert result.matches
    assert result.holds
    assert result.values() == {"integrity/equation/product": 0.0}
    assert result.text == "the products equal their reference equation, to 0e+00"


def test_no_mistake_is_computed_where_a_variant_gives_the_numbers() -> None:
    """A trainer with a published variant is compared in every sampled update."""
    mistakes: list[Factors] = []
    sums = replace(PRODUCT.hypotheses[0], compute=mistakes.append)
    equation = replace(PRODUCT, hypotheses=(sums, *PRODUCT.hypotheses[1:]))
    differences = FACTORS.left - FACTORS.right

    variant = compare(equation, FACTORS, differences.float())
    assert names(variant) == {"difference"}
    assert not mistakes

    near = compare(equation, FACTORS, differences + 5e-5)  # a mistake could be nearer
    assert names(near) == {"difference"}
    assert mistakes


def test_a_variant_in_one_batch_does_not_hide_the_mistake_of_another() -> None:
    """Checks that a variant explains are independent of the update's other checks."""
    variant, mistake = check(FACTORS.left - FACTORS.right), check(FACTORS.left + FACTORS.right)

    values = {key: value for group in EquationCheck.together([variant, mistake]) for key, value in group.values().items()}

    assert set(values) == {"integrity/equation/product", "integrity/equation/product_sum"}


def test_a_hypothesis_that_gives_the_numbers_is_named() -> None:
    result = check(torch.tensor([3.0, 2.5, 7.0, 6.0]))

    assert not result.holds
    assert names(result) == {"sum"}
    assert result.values() == {"integrity/equation/product": 5 / 12, "integrity/equation/product_sum": 0.0}
    assert result.text == (
        "the products equal sums of the factors, and differ from their reference equation by 41.7 % of the largest number"
    )
    assert result.details.splitlines()[1:] == ["reference: p = a b (arithmetic)", "equal to: p = a + b (a schoolbook)", "Multiply."]


def test_a_parameter_is_fitted_where_nothing_else_explains_the_numbers() -> None:
    result = check(torch.tensor([3.0, 1.5, 18.0, 7.5]))

    assert [(one.hypothesis.name, one.fitted) for one in result.explanations] == [("factor", 1.5)]
    assert result.values()["integrity/fitted/product_factor"] == 1.5
    assert "products times a factor c = 1.5" in result.text


def test_a_fit_is_confirmed_on_the_rows_that_it_did_not_see() -> None:
    assert check(torch.tensor([3.0, 9.9, 18.0, 7.5])).explanations == ()


def test_checks_of_an_update_are_joined_and_a_mistake_must_explain_each_that_fails() -> None:
    good, summed = check(torch.tensor([2.0, 1.0, 12.0, 5.0])), check(torch.tensor([3.0, 2.5, 7.0, 6.0]))
    unknown = check(torch.tensor([0.0, 1.0, 7.0, 3.0]))

    def joined(*checks: EquationCheck) -> set[str]:
        return {key for group in EquationCheck.together(checks) for key in group.values()}

    assert joined(good, summed) == {"integrity/equation/product", "integrity/equation/product_sum"}
    assert joined(good, summed, unknown) == {"integrity/equation/product"}


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_not_compared(number: float) -> None:
    result = check(torch.tensor([number, 1.0, 12.0, 5.0]))

    assert result.holds
    assert result.reason == "some of the numbers are NaN or infinite"
    assert result.values() == {}


def test_a_reference_that_overflows_is_not_compared() -> None:
    power = replace(PRODUCT, compute=lambda inputs: (1000 * inputs.left).exp())

    assert compare(power, FACTORS, torch.ones(4)).reason == "the reference equation gives NaN or infinite numbers"


def test_a_tolerance_of_its_own_is_recorded_beside_the_error() -> None:
    """Judges read the record alone, and must use the same tolerance as the check."""
    numbers = torch.tensor([2.0, 1.0, 12.0, 5.1])
    strict, lenient = (compare(PRODUCT, FACTORS, numbers, tolerance=bound) for bound in (None, 0.05))

    assert not strict.matches
    assert lenient.matches
    assert "integrity/equation_tolerance/product" not in strict.values()
    assert lenient.values()["integrity/equation_tolerance/product"] == 0.05


def test_declared_equations_have_a_place_of_their_own_among_causes() -> None:
    """Advantages before returns, both before the losses, and the optimizer last."""
    ranks = {equation.name: equation.rank for equation in equations().values()}

    assert len(set(ranks.values())) == len(ranks)
    chain = ("transitions", "log_probs", "advantages", "returns", "normalized_advantages", "policy_loss", "gradient", "optimizer_step")
    assert sorted(chain, key=ranks.__getitem__) == [*chain]


def test_declared_equations_and_their_hypotheses_have_labels_of_their_own() -> None:
    labels = [equation.label(one) for equation in equations().values() for one in (None, *equation.hypotheses)]

    assert labels
    assert len(labels) == len(set(labels))


def test_every_hypothesis_has_a_source_or_a_program_that_shows_it() -> None:
    """A program is one of benchmarks/mistakes, or a module of tests/. An equation's own module names all hypotheses without a source."""
    modules = {path.stem: path for path in Path(__file__).parents[2].glob("tests/*/*.py")}

    for equation in equations().values():
        shown = modules[equation.shown_by].read_text(encoding="utf-8") if equation.shown_by else ""
        for one in equation.hypotheses:
            program = one.source.removeprefix("program: ")
            assert one.source or re.search(rf"\b{one.name}\b", shown), f"{equation.name}: {one.name}"
            if program != one.source:
                assert program in modules or program in BY_NAME, f"{equation.name}: {one.name}"
