"""Private training with kinks: the hinge loss of a linear model and of a ReLU network.

breast_cancer, 455 training records, replace-one, delta = 1e-5; accuracy on 114 held-out
public records by the command line's recipes, which were chosen on validation splits of the
training records. ``o2nc`` reads every record once; ``dpzero`` reads all at every step.
Means over seeds (of noise, directions and initial parameters) with the 95% interval of
Student's t.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

import jaxdp
from bench import _harness
from jaxdp import models
from jaxdp.cli import recipes
from jaxdp.transforms.averaging import polyak_output

DELTA, HIDDEN = 1e-5, 8
CASES = (("linear", {}), ("mlp", {"hidden": (HIDDEN,)}))


def accuracies(
    model: str, algorithm: recipes.Algorithm, epsilon: float, num_seeds: int
) -> np.ndarray:
    """Test accuracy of each seed; shape=(num_seeds,)."""
    dataset = models.load("breast_cancer")
    network = models.network_for(dataset, model, loss="hinge", **dict(CASES)[model])
    recipe: Any = recipes.find(dataset.name, model, algorithm, epsilon)
    leaves = jax.tree.leaves(network.init(jax.random.key(0)))
    dim = sum(math.prod(x.shape) for x in leaves)
    if recipe.num_directions > dim:
        recipe = dataclasses.replace(recipe, num_directions=dim)
    plan = recipes.make_plan(
        recipe,
        algorithm,
        num_examples=dataset.num_examples,
        epsilon=epsilon,
        delta=DELTA,
    )
    scores = []
    for seed in range(num_seeds):
        result = jaxdp.fit(
            plan,
            jaxdp.Keys.insecure(seed),
            network.init(jax.random.key(seed)),
            dataset.train,
            value_fn=network.value_fn,
            optimizer=recipes.make_optimizer(recipe),
        )
        params = result.params
        if recipe.average:
            params = polyak_output(result.info.state)
        scores.append(float(network.metric_fn(params, *dataset.test)))
    return np.array(scores)


def run(quick: bool) -> list[_harness.Row]:
    """One row a model, algorithm and budget; and the share of the larger class."""
    labels = models.load("breast_cancer").test[1]
    majority = float(np.bincount(np.asarray(labels)).max() / len(labels))
    rows = [_harness.Row("majority class", "test accuracy", majority, "")]
    for model, _ in CASES:
        for algorithm in ("o2nc", "dpzero"):
            for epsilon in (2.0, 8.0):
                found = accuracies(model, algorithm, epsilon, 3 if quick else 20)
                mean = _harness.mean(found)
                case = f"{model}, {algorithm}, epsilon {epsilon:g}"
                unit = f"±{mean.half_width:.2g} (95%, n={len(found)})"
                rows.append(_harness.Row(case, "test accuracy", mean.value, unit))
    return rows
