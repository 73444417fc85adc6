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


def test_a_dtype_is_named_without_what_the_data_decide() -> None:
    """The length of the longest text, the unit of a date, the fields of a record."""
    names = {
        "U24": "text",
        "S24": "text",
        "M8[m]": "datetime64",
        "m8[s]": "timedelta64",
    }
    names |= {"V24": "void", "f4": "float32", "O": "object", "?": "bool"}
    for given, name in names.items():
        assert validate.dtype_name(np.dtype(given)) == name
        assert validate.is_numeric(np.zeros(1, given)) == (name in ("float32", "bool"))
    for dtype in (
        jnp.bfloat16,
        jnp.int4,
        jnp.float8_e4m3fn,
    ):  # Of the kind "V" as well.
        assert validate.dtype_name(jnp.dtype(dtype)) == jnp.dtype(dtype).name
        assert validate.is_numeric(jnp.zeros(1, dtype))
