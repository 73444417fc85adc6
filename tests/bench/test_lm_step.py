"""The benchmark of language-model steps, on a model of a few thousand parameters."""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxdp.models.language import LanguageModel, RobertaConfig, checkpoint, tasks

pytestmark = pytest.mark.slow

SMALL = RobertaConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=18,
)


@pytest.fixture(scope="module")
def lm_step() -> Iterator[Any]:
    """``bench`` is run from the root of the repository and never installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(pathlib.Path(__file__).resolve().parents[2]))
        from bench import lm_step

        yield lm_step


@pytest.mark.filterwarnings("ignore:smoothing_radius")  # 16-bit weights, on purpose
def test_rows_of_a_large_model(lm_step: Any) -> None:
    """What only a GPU runs, here: every figure is there and above zero."""
    rows = lm_step.large("small", SMALL, 2, 8)
    assert [row.metric for row in rows[:3]] == [
        "step",
        "tokens",
        "temp over weights",
    ]
    assert len({row.case for row in rows}) == len(lm_step.LAWS)
    for row in rows:
        assert row.value is not None and row.value > 0
    # One set of weights, and beside them not much more than activations.
    needed = [row.value for row in rows if row.metric == "memory over weights"]
    temp = [row.value for row in rows if row.metric == "temp over weights"]
    assert all(1 <= a - b < 1.1 for a, b in zip(needed, temp, strict=True))
    assert rows[0].ratio is not None and rows[0].baseline == "two forwards"


def test_without_a_gpu_the_large_models_are_skipped(lm_step: Any) -> None:
    assert jax.default_backend() == "cpu"
    rows = lm_step._large(quick=True)
    assert {row.note for row in rows} == {"skipped: needs a GPU"}
    assert all(row.value is None for row in rows)


def test_the_models_have_the_sizes_that_are_named(lm_step: Any) -> None:
    for size, millions in (("20 M", 20), ("200 M", 200)):
        model = LanguageModel(config=lm_step.config(size))
        shapes = jax.eval_shape(model._init, jax.random.key(0))
        count = sum(x.size for x in jax.tree.leaves(shapes)) / 1e6
        assert millions <= count <= 1.05 * millions


def test_torch_takes_the_same_step(lm_step: Any, tmp_path: pathlib.Path) -> None:
    """Same losses, and a step that moves along one Gaussian direction and comes back."""
    torch = pytest.importorskip("torch")
    from bench import _torch_mezo

    model = LanguageModel(config=SMALL)
    params = model.init(jax.random.key(0))
    checkpoint.save(tmp_path, SMALL, params)
    arrays = lm_step.batch(2, 8, 64) | {"words": np.asarray((7, 9), np.int32)}
    side = _torch_mezo.side(tmp_path, arrays)
    task = tasks.prompt(model, (7, 9))
    np.testing.assert_allclose(
        side["losses"](), task.value_fn(params, lm_step.batch(2, 8, 64)), rtol=1e-4
    )
    still = _torch_mezo.Roberta(tmp_path)
    batch = {n: torch.from_numpy(x.copy()) for n, x in arrays.items()}
    before = {n: x.clone() for n, x in still.params.items()}
    options = {"radius": 1e-3, "clip": 1.0, "noise": 1.0, "learning_rate": 0.0}
    _torch_mezo.step(still, batch, 3, **options)
    for name, x in still.params.items():
        np.testing.assert_allclose(x, before[name], atol=1e-6)
