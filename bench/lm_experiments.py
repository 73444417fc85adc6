"""The noise of the DPZero paper's language-model experiments, and what its runs can claim.

*Noise.* Standard deviation on a step's mean slope, in clips: by the paper's formula, by the
released code (twice opacus' multiplier over the batch size), and by our accounting for full
batches, Poisson batches and those of ours, which ratios are to.

*Claims.* The least epsilon proved of the paper's own runs, had their noise been secret:
as they were run, in shuffled batches, and as if batches had been sampled. Ratios are to
the epsilon that was claimed. Upper bounds, not attacks.

Nothing is timed. The figures that the paper printed are
``PRINTED`` and ``COSTS`` of ``bench/_lm_experiments.py``.
"""

from bench import _harness, _lm_experiments
from bench._lm_experiments import EPSILONS, EXPERIMENTS

QUICK = ("roberta-large/sst-2", "opt-1.3b/sst-2")


def run(quick: bool) -> list[_harness.Row]:
    """Rows for each setting that accounting can tell apart, at epsilon 2 and 6."""
    chosen = [EXPERIMENTS[name] for name in QUICK] if quick else [*EXPERIMENTS.values()]
    epsilons = EPSILONS[:1] if quick else EPSILONS
    noise = _lm_experiments.noise_table(chosen, epsilons)
    claims = _lm_experiments.claims_table(chosen, epsilons)
    return [
        *(found for row in noise for found in _noise(row)),
        *(found for row in claims for found in _claims(row)),
    ]


def _case(names: tuple[str, ...], epsilon: float) -> str:
    """The tasks, without the sizes of the models."""
    families = dict.fromkeys(name.split("-")[0] for name in names)
    tasks = dict.fromkeys(name.split("/")[1] for name in names)
    return f"{', '.join(families)}: {', '.join(tasks)}; epsilon {epsilon:g}"


def _noise(row: _lm_experiments.NoiseRow) -> list[_harness.Row]:
    case = _case(row.experiments, row.epsilon)
    ours = row.ours_replace_one
    stds = {
        "paper's formula": row.paper,
        "released code": row.code,
        "full batch, replace-one": row.full_batch,
        "Poisson, replace-one": row.poisson_replace_one,
        "Poisson, add-or-remove": row.poisson_add_or_remove,
        "ours, replace-one": ours,
        "ours, add-or-remove": row.ours_add_or_remove,
    }
    baseline = "ours, replace-one"
    return [
        *(
            _harness.Row(case, f"noise: {name}", std, "clips", baseline, std / ours)
            for name, std in stds.items()
        ),
        _harness.Row(case, "opacus multiplier", row.opacus, ""),
    ]


def _claims(row: _lm_experiments.ClaimRow) -> list[_harness.Row]:
    case = _case(row.experiments, row.claimed)
    spent = {
        "shuffled, replace-one": row.shuffled_replace_one,
        "shuffled, zero-out": row.shuffled_zero_out,
        "fresh subsets, replace-one": row.subsets_replace_one,
        "Poisson, replace-one": row.poisson_replace_one,
        "Poisson, add-or-remove": row.poisson_add_or_remove,
    }
    against = f"claimed {row.claimed:g}"
    return [
        _harness.Row(
            case, f"claim: {name}", float(e), "epsilon", against, e / row.claimed
        )
        for name, e in spent.items()
    ]
