"""Studies: every setting and seed is the run that ``fit`` would make, in one program."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import Keys, plans, sampling
from jaxdp.training import streaming
from tests import methods
from tests.training import problem

# That each method's study is its fit is in test_conformance.py.
RATES = (0.03, 0.3)


def out_norm(result: jaxdp.FitResult) -> jax.Array:
    return -jnp.linalg.norm(result.params["out"])


def dpgd(**changes: Any) -> plans.DPGD:
    base: dict[str, Any] = {
        "num_examples": problem.N,
        "num_steps": 9,
        "sampling": sampling.TruncatedPoisson(sampling_prob=0.5),
        "relation": "replace_one",
        "l2_clip_norm": 0.5,
        "noise_multiplier": 1e-6,
        "delta": 1e-5,
    }
    return plans.DPGD(**(base | changes))


def study(plan: Any, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "value_fn": problem.value_fn,
        "score_fn": out_norm,
        "optimizer": optax.sgd,
        "grid": {"learning_rate": RATES},
        "seeds": 2,
    }
    return jaxdp.study(plan, problem.PARAMS, problem.DATA, **(given | changes))


def test_the_program_of_a_study_closes_over_no_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compilation cache would write them into a file."""
    held, real = [], jax.jit

    def jit(fn: Any, **more: Any) -> Any:
        def called(*given: Any) -> Any:
            if isinstance(given[0], dict) and "learning_rate" in given[0]:
                consts = jax.make_jaxpr(fn)(*given).consts
                held.append([np.shape(x)[:1] for x in consts])
            return real(fn, **more)(*given)

        return called

    with monkeypatch.context() as patch:
        patch.setattr(jax, "jit", jit)
        assert np.isfinite(study(dpgd()).scores).all()
    (rows,) = held
    assert (problem.N,) not in rows


def test_a_large_map_that_a_study_reads_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_LARGE", 1)
    np.save(tmp_path / "x.npy", np.ones((problem.N, 2), np.float32))
    data = np.load(tmp_path / "x.npy", mmap_mode="r")
    given: Any = {"value_fn": problem.value_fn, "score_fn": out_norm}
    given |= {"optimizer": optax.sgd, "grid": {"learning_rate": RATES}}
    with (
        pytest.warns(UserWarning, match="read whole: a study") as found,
        pytest.raises(TypeError, match="microbatch_size"),
    ):
        jaxdp.study(dpgd(), problem.PARAMS, data, **given, microbatch_size="few")
    assert [x.filename for x in found] == [__file__]


def test_settings_are_those_of_fit() -> None:
    """Learning rates to rounding, and clips where noise does not matter: batches of all."""
    plan = dpgd(sampling=sampling.FullBatch())
    grid = {"learning_rate": RATES, "l2_clip_norm": (0.05, 0.5, 5.0)}
    result = study(
        plan,
        grid=grid,
        optimizer=lambda learning_rate: optax.sgd(learning_rate, momentum=0.9),
    )
    assert len(result.settings) == 6 and result.scores.shape == (6, 2)
    for i in (0, 4, 5):  # Both rates and every clip.
        setting, metrics = result.settings[i], result.scores[i]
        clipped = dataclasses.replace(plan, l2_clip_norm=setting["l2_clip_norm"])
        fitted = jaxdp.fit(
            clipped,
            Keys.insecure(1),
            problem.PARAMS,
            problem.DATA,
            value_fn=problem.value_fn,
            optimizer=optax.sgd(setting["learning_rate"], momentum=0.9),
        )
        np.testing.assert_allclose(metrics, float(out_norm(fitted)), rtol=1e-4)
    assert len(np.unique(result.scores.round(4))) > 4  # Settings matter.


def test_clips_scale_the_noise() -> None:
    """Without slopes all that moves is noise, which is in proportion to the clip."""
    zero = lambda params, batch: 0 * problem.value_fn(params, batch)  # noqa: E731
    grid = {"learning_rate": (0.1,), "l2_clip_norm": (0.5, 2.0)}
    moved = lambda run: jnp.linalg.norm(run.params["out"] - problem.PARAMS["out"])  # noqa: E731
    plan = dpgd(noise_multiplier=1.0)
    result = study(plan, value_fn=zero, score_fn=moved, grid=grid, seeds=3)
    np.testing.assert_allclose(result.scores[1], 4 * result.scores[0], rtol=1e-4)
    assert len(np.unique(result.scores[0])) == 3  # Each seed has its own noise.


def test_lazy_losses_are_scaled_too() -> None:
    lazy = jaxdp.LazyLoss(
        lambda params, batch, at: (
            batch[0][:, :5] @ at("out", params["out"]) * params["hidden"]["w"][0, 0]
        )
    )
    plain = lambda params, batch: lazy(params, batch)  # noqa: E731
    grid = {"learning_rate": (0.1,), "l2_clip_norm": (0.1, 1.0)}
    plan, found = problem.make_plan(num_steps=4), []
    for value_fn in (lazy, plain):
        trainable = lambda path: path == "out"  # noqa: E731
        found.append(study(plan, value_fn=value_fn, grid=grid, trainable=trainable))
    np.testing.assert_allclose(found[0].scores, found[1].scores, rtol=1e-5)


def test_one_program() -> None:
    """The losses are traced as often for one setting as for six."""
    counts = []
    for rates in ((0.1,), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)):
        traces = []

        def value_fn(params: Any, batch: Any, traces: list[int] = traces) -> jax.Array:
            traces.append(1)
            return problem.value_fn(params, batch)

        study(dpgd(), value_fn=value_fn, grid={"learning_rate": rates})
        counts.append(len(traces))
    assert counts[0] == counts[1]


def test_table_and_best() -> None:
    """A setting with a run of NaN is the worst."""
    settings = ({"a": 1.0}, {"a": 2.0}, {"a": 3.0})
    metrics = np.asarray([[0.1, 0.2], [0.9, np.nan], [0.3, 0.1]])
    result = jaxdp.training.StudyResult(settings, metrics)
    assert result.best == {"a": 3.0}
    header, *rows = str(result).splitlines()
    assert header.split() == ["a", "mean", "lowest", "highest"]
    assert rows[2].split() == ["3", "0.2", "0.1", "0.3"]


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"optimizer": None},
            ValueError,
            "optimizer must be a function of learning_rate",
        ),
        ({"optimizer": optax.sgd(0.1)}, TypeError, "optimizer must be a function"),
        ({"grid": {"rate": (0.1,)}}, TypeError, r"optimizer must take \['rate'\]"),
        ({"grid": {"learning_rate": ()}}, TypeError, r"grid\['learning_rate'\]"),
        ({"grid": {"learning_rate": 0.1}}, TypeError, r"grid\['learning_rate'\]"),
        ({"grid": {"learning_rate": (np.inf,)}}, ValueError, "must be finite numbers"),
        ({"grid": {"l2_clip_norm": (0.0,)}}, ValueError, "l2_clip_norm must be"),
        ({"grid": [("learning_rate", (0.1,))]}, TypeError, "grid must be"),
        ({"seeds": 0}, ValueError, "seeds must be"),
        ({"score_fn": 1.0}, TypeError, "score_fn must be callable"),
    ],
)
def test_mistakes(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        study(dpgd(), **changes)


def test_a_clip_of_steps_that_the_plan_makes_is_refused() -> None:
    (method,) = (m for m in methods.METHODS if m.name == "o2nc")
    with pytest.raises(ValueError, match="grid must not have l2_clip_norm for o2nc"):
        jaxdp.study(
            method.plan,
            method.params,
            method.data,
            value_fn=method.value_fn,
            score_fn=lambda run: jnp.sum(run.params),
            grid={"l2_clip_norm": (1.0,)},
        )
