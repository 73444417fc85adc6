"""What a release of users' records is charged as: a user moves more than a record does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import Keys, metrics
from jaxdp.core.types import UserRecords
from jaxdp.sampling import batches

USERS = UserRecords(np.ones((300, 2, 2), np.float32), np.ones((300, 2), bool))
#: What all three take.
SHARED: dict[str, Any] = {"relation": "zero_out", "num_examples": 300}


def losses(x: Any, batch: Any) -> Any:
    """Losses of users, (B,), as the means over their records."""
    return jnp.mean(batch.records @ x, axis=1)


def choice(budget: jaxdp.Budget) -> Any:
    """Makes a private choice."""
    given: Any = (losses, [jnp.zeros(2), jnp.ones(2)], USERS, Keys.from_entropy())
    return metrics.private_choice(
        *given, epsilon=0.5, linf_clip_norm=1.0, budget=budget, **SHARED
    )


def goldstein(budget: jaxdp.Budget) -> Any:
    """Makes a private certificate."""
    return metrics.private_goldstein(
        *(losses, jnp.zeros(2), USERS, Keys.from_entropy()),
        radius=0.1,
        l2_clip_norm=1.0,
        noise_multiplier=9.0,
        budget=budget,
        delta=1e-6,
        **SHARED,
    )


def gap(budget: jaxdp.Budget) -> Any:
    """Makes a private duality gap."""
    half = np.full(2, 0.5)
    return metrics.private_gap(
        *(jaxdp.Problem(losses), half, None, USERS, Keys.from_entropy()),
        linf_clip_norm_x=1.0,
        noise_multiplier=9.0,
        budget=budget,
        delta=1e-6,
        **SHARED,
    )


@pytest.mark.parametrize("release", [choice, goldstein, gap])
def test_a_release_of_users_is_reserved_as_one(
    release: Callable[..., Any], tmp_path: Path
) -> None:
    total: Any = {"epsilon": 9.0, "delta": 1e-3, "relation": "zero_out"}
    of_users = jaxdp.Budget.create(tmp_path / "user", unit="user", **total)
    of_records = jaxdp.Budget.create(tmp_path / "record", unit="record", **total)
    with pytest.raises(ValueError, match="unit must be the budget's, 'record', got"):
        release(of_records)
    release(of_users)
    assert len(of_users.reservations) == 1
    assert of_records.reservations == ()


def test_users_are_found_within_a_tree() -> None:
    assert batches.unit_of(({"x": USERS}, np.ones(300))) == "user"
    assert batches.unit_of(({"x": USERS.records}, np.ones(300))) == "record"
