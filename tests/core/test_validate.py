"""Checks of arguments say what was given, but show no data."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import Keys
from jaxdp.core import validate

SECRET = np.array([1234.5, 2.0])


@pytest.mark.parametrize(
    "check",
    [
        lambda x: validate.integer(num_steps=x),
        lambda x: validate.positive(num_steps=x),
        lambda x: validate.non_negative(num_steps=x),
        lambda x: validate.probability(num_steps=x),
        lambda x: validate.instance(int, num_steps=x),
        Keys.insecure,
    ],
)
@pytest.mark.parametrize("value", [SECRET, jnp.asarray(SECRET)])
def test_an_array_is_named_by_its_shape(check: Any, value: Any) -> None:
    with pytest.raises(TypeError, match=r"an array of shape \(2,\)") as error:
        check(value)
    assert "1234" not in str(error.value)
