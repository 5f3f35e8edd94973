"""Two draws of random columns for each test that takes a seed."""

import pytest


@pytest.fixture(params=range(2))
def seed(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number
