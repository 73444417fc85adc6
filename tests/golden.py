"""Writes what ``tests/test_golden.py`` compares: ``python -m tests.golden``.

Only where what a plan's text means is meant to change: the CHANGELOG then says which and
why. Plans that are there keep their stored text, so that texts of before are still read;
new ones are added.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from bench import audit
from bench._lattice_plans import LATTICE_PLANS
from jaxdp import plans, sampling
from jaxdp.sosp.theory import design

FILE = pathlib.Path(__file__).parent / "golden.json"


def made() -> Iterator[tuple[str, Any]]:
    """Plans of every kind, sampler, relation and noise, some by theorems."""
    yield from LATTICE_PLANS.items()
    for name, (changes, epsilon) in audit.CASES.items():
        yield f"DPZero, {name}", audit._dpzero(changes, epsilon)
    for name, (changes, epsilon) in audit.ORACLES.items():
        yield name, audit._o2nc(changes, epsilon)
    for name, changes in audit.SOSP.items():
        yield f"{name}, many records", audit._sosp(changes)
    for name, sizes in audit.SADDLES.items():
        yield name, audit._saddle(*sizes)
    yield "ConvexSimplex", audit._convex()
    yield "SyntheticData", audit._synthetic()
    wolfe = audit._frank_wolfe()
    yield "FrankWolfe", wolfe
    yield (
        "FrankWolfe, one pass",
        dataclasses.replace(wolfe, sampling=sampling.SinglePass(4)),
    )
    budget: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6}
    for num_steps, start in ((1, 6), (5, 3)):
        yield (
            f"MWEM, {num_steps} steps",
            plans.MWEM(
                num_examples=1000,
                num_steps=num_steps,
                relation="replace_one",
                sizes=(2, 3, 4),
                attributes=((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)),
                num_start=start,
            ).calibrate(**budget),
        )
    curved = {"num_examples": 200_000, "dim": 10, "relation": "replace_one"} | budget
    curved |= {"lipschitz": 1.0, "smoothness": 1.0, "hessian_lipschitz": 1.0}
    for relation in ("replace_one", "zero_out"):
        yield (
            f"SOSP, certified, {relation}",
            _without_margin(**curved | {"relation": relation}),
        )
    yield "SOSP, certified, no accuracy given", plans.SOSP.certified(**curved)
    problem = {"num_examples": 100_000, "dim": 20, "lipschitz": 1.0} | budget
    problem |= {"relation": "replace_one"}
    kinked = problem | {"initial_gap": 1.0, "smoothing_radius": 0.1}
    yield "O2NC, certified", plans.O2NC.certified(**kinked)
    for theorem in ("4.9", "3.1", "6.1"):
        yield f"O2NC, theorem {theorem}", plans.O2NC.from_theorem(theorem, **kinked)
    smooth = problem | {"smoothness": 1.0, "initial_gap": 1.0, "value_bound": 1.0}
    for theorem in ("3", "3'"):
        yield (
            f"DPZero, theorem {theorem}",
            plans.DPZero.from_theorem(theorem, **smooth, effective_rank=5.0),
        )
    for sampler in (
        sampling.FixedSize(8),
        sampling.External(8),
        sampling.SinglePass(8),
        sampling.ShuffledEpochs(8),
        sampling.CyclicEpochs(8),
        sampling.CyclicPoisson(num_groups=4, sampling_prob=0.25),
    ):
        name = f"DPZero, {type(sampler).__name__}"
        changes = {"sampling": sampler, "num_examples": 64, "num_steps": 8}
        yield name, audit._dpzero(changes, 1.0)
    for oracle, passes in (("first_order", True), ("scalar", False), ("scalar", True)):
        yield (
            f"O2NC, certified, {oracle}, several passes: {passes}",
            plans.O2NC.certified(**kinked, oracle=oracle, multi_pass=passes),
        )
    for theorem in ("E", "4.1", "4.1 first-order"):
        yield f"O2NC, theorem {theorem}", plans.O2NC.from_theorem(theorem, **kinked)
    for hessian in ("tracked", "released"):
        yield f"SOSP, certified, {hessian}", _without_margin(**curved, hessian=hessian)
    game: dict[str, Any] = {"num_examples": 100_000, "relation": "replace_one"} | budget
    game |= {"lipschitz": 1.0, "smoothness": 1.0}
    two = {"dim_x": 20, "dim_y": 10}
    curves = {"second_order_smoothness": 0.5}
    cells = {"num_examples": 10_000, "domain_size": 64, "num_queries": 40} | budget
    cells |= {"relation": "replace_one"}
    for kind, theorem, constants in (
        (plans.Saddle, "4.1", game | two | curves),
        (plans.Saddle, "4.2", game | two),
        (plans.SaddleBiasReduced, "4.3", game | two | curves | {"level_seed": 3}),
        (plans.ConvexSimplex, "5.1", game | {"dim": 20} | curves),
        (plans.SyntheticData, "G.1", cells),
    ):
        name = kind.__name__
        yield f"{name}, theorem {theorem}", kind.from_theorem(theorem, **constants)
        if theorem != "4.2":
            yield f"{name}, certified", kind.certified(**constants)
    yield (
        "SaddleBiasReduced",
        plans.SaddleBiasReduced(
            num_examples=20_000,
            relation="zero_out",
            dim_x=30,
            dim_y=30,
            linf_clip_norm_x=1.0,
            linf_clip_norm_y=1.0,
            vertex_budget=200,
            level_seed=3,
        ).calibrate(**budget),
    )


def _without_margin(**numbers: Any) -> plans.SOSP:
    """A search whose accuracy is the least for which its expected records fit."""
    choices = design.Choices(**numbers, trigger_factor=3.0)
    accuracy = design.least_accuracy(choices, 1)
    return plans.SOSP.certified(**numbers, accuracy=accuracy)


def described(plan: Any) -> dict[str, Any]:
    """What must not change of a plan whose text is stored."""
    return {
        "digest": plan.digest,
        "event": repr(plan.event),
        "relation": plan.event_relation.name,
        "epsilon": float(plan.epsilon(delta=plan.delta or 1e-5)),
    }


def main() -> None:
    """Writes the file: texts that are there, and those of new plans."""
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    texts = {name: known["plan"] for name, known in stored.items()}
    for name, plan in made():
        texts.setdefault(name, plan.to_json())
    found = {
        name: {"plan": text, **described(plans.from_json(text))}
        for name, text in texts.items()
    }
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
