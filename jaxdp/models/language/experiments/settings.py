"""Settings of each model and task; shared ones are stated once."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from jaxdp import plans
from jaxdp import sampling as samplers
from jaxdp.core.types import Relation
from jaxdp.dpzero.plan import DirectionLaw
from jaxdp.models.language.experiments.printed import PRINTED, Printed
from jaxdp.models.language.text import template_fields

#: The budgets of all tables.
EPSILONS = (2.0, 6.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One model on one task, with the paper's numbers.

    Attributes:
      model: ``"roberta-large"``, ``"opt-1.3b"`` and so on: which checkpoint to load.
      task: ``"sst-2"``, ``"squad"`` and so on: which data.
      kind: the loss, as ``jaxdp.models.language.tasks`` names it.
      template: the prompt; its names in braces are fields of the file of records.
      label_field: the field with the class; None for generation.
      answer_field: the field with the answer, a text or a list of texts; None for classes.
      classes: what ``label_field`` holds, in the order of ``label_words``. Numbers are
        those of the data sets' public copies (SNLI: 0 is entailment).
      label_words: the word for each class, one token each with a space before it.
      metric: the function of ``tasks`` that judges.
      max_length: tokens that a record is cut or padded to.
      span_length: most tokens of a choice or an answer, and of what is generated; None
        for prompts.
      compute_dtype: of activations. (The paper's OPT had float16 weights and losses.)
      num_examples: n, records for training, as the paper drew them.
      num_test: records for testing.
      code_num_examples: the n that the released code calibrates for.
      num_steps: T.
      batch_size: B, expected records of a step.
      smoothing_radius: lambda.
      learning_rate: a step size to begin with, constant.
      learning_rates: those that the paper tried.
      l2_clip_norm: a clip to begin with; the paper chose one for each task and run.
      l2_clip_norms: those that the paper tried.
      directions: laws of directions; the first is the paper's main one.
      delta: of the guarantee.
      data_seeds: with which the paper drew the records.
    """

    model: str
    task: str
    kind: Literal["prompt", "choice", "generation"]
    template: str
    label_field: str | None = "label"
    answer_field: str | None = None
    classes: tuple[str, ...] = ()
    label_words: tuple[str, ...] = ()
    metric: Literal["accuracy", "token_f1"] = "accuracy"
    max_length: int
    span_length: int | None = None
    compute_dtype: str
    num_examples: int
    num_test: int = 1000
    code_num_examples: int
    num_steps: int
    batch_size: int
    smoothing_radius: float = 1e-3
    learning_rate: float
    learning_rates: tuple[float, ...]
    l2_clip_norm: float
    l2_clip_norms: tuple[float, ...]
    directions: tuple[DirectionLaw, ...] = ("gaussian",)
    delta: float = 1e-5
    data_seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """``model/task``: the key in :data:`EXPERIMENTS`."""
        return f"{self.model}/{self.task}"

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that a record must have, the one to be predicted last."""
        target = self.label_field or self.answer_field or ""
        return (*template_fields(self.template), target)

    @property
    def options(self) -> dict[str, Any]:
        """Options of a run, by their names in ``jaxdp finetune``."""
        found = {
            "task": self.kind,
            "template": self.template,
            "label_field": self.label_field,
            "answer_field": self.answer_field,
            "labels": self.classes or None,
            "label_words": self.label_words or None,
            "max_length": self.max_length,
            "span_length": self.span_length,
            "compute_dtype": self.compute_dtype,
            "num_steps": self.num_steps,
            "batch_size": self.batch_size,
            "l2_clip_norm": self.l2_clip_norm,
            "smoothing_radius": self.smoothing_radius,
            "learning_rate": self.learning_rate,
            "direction": self.directions[0],
            "delta": self.delta,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def printed(self) -> tuple[Printed, ...]:
        """Printed results of the paper for this model and task."""
        return tuple(p for p in PRINTED if f"{p.model}/{p.task}" == self.name)

    def plan(
        self,
        *,
        epsilon: float,
        relation: Relation,
        l2_clip_norm: float | None = None,
        num_examples: int | None = None,
        sampling: samplers.AnySampler | None = None,
        direction: DirectionLaw | None = None,
        delta: float | None = None,
    ) -> plans.DPZero:
        """Returns the calibrated plan of a run, without noise if epsilon is infinite.

        Args:
          epsilon: > 0; infinity is MeZO, whose clip is infinite unless one is given.
          relation: which data sets are neighbours.
          l2_clip_norm: C; None is the one to begin with.
          num_examples: n of the file at hand; None is the paper's.
          sampling: None is ``TruncatedPoisson`` of the paper's batch size in expectation
            (``FullBatch`` where that is all records).
          direction: law of the directions; None is the first of ``directions``.
          delta: None is the paper's.

        Raises:
          TypeError, ValueError: as :class:`jaxdp.plans.DPZero`.
        """
        private = not math.isinf(epsilon)
        if l2_clip_norm is None:
            l2_clip_norm = self.l2_clip_norm if private else math.inf
        n = self.num_examples if num_examples is None else num_examples
        plan = plans.DPZero(
            num_examples=n,
            num_steps=self.num_steps,
            sampling=self._sampler(n) if sampling is None else sampling,
            relation=relation,
            l2_clip_norm=l2_clip_norm,
            smoothing_radius=self.smoothing_radius,
            direction=direction or self.directions[0],
        )
        if not private:
            return plan.with_noise(noise_multiplier=0.0)
        return plan.calibrate(
            epsilon=epsilon, delta=self.delta if delta is None else delta
        )

    def _sampler(self, num_examples: int) -> samplers.AnySampler:
        if num_examples <= self.batch_size:
            return samplers.FullBatch()
        q = self.batch_size / num_examples
        return samplers.TruncatedPoisson(sampling_prob=q)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstOrder:
    """Settings of the first-order baselines of Table 2: AdamW and LoRA, private or not.

    Attributes:
      num_steps: of a run.
      batch_size: of a step.
      learning_rates: those that were tried.
      l2_clip_norms: those that were tried, on a record's gradient.
      lora_rank: of LoRA's factors.
      lora_alpha: LoRA's scale, over the rank.
    """

    num_steps: int = 1000
    batch_size: int = 64
    learning_rates: tuple[float, ...] = (5e-5, 1e-4, 5e-4, 1e-3)
    l2_clip_norms: tuple[float, ...] = (0.1, 0.5, 1.0, 10.0)
    lora_rank: int = 8
    lora_alpha: float = 16.0


FIRST_ORDER = FirstOrder()


# --- the settings ------------------------------------------------------------------

_FILM = "All in all, this film is"

#: Tasks of RoBERTa: records are 512 of each class, and at most 1000 to test.
_PROMPTS: dict[str, dict[str, Any]] = {
    "sst-2": {
        "template": f"{{sentence}} {_FILM} {{mask}}.",
        "label_words": ("bad", "good"),
        "max_length": 128,
        "directions": ("gaussian", "sphere"),  # Table 7
    },
    "sst-5": {
        "template": f"{{text}} {_FILM} {{mask}}.",
        "label_words": ("awful", "poor", "average", "good", "superb"),
        "max_length": 128,
        "directions": ("gaussian", "sphere"),
    },
    "snli": {
        "template": "Given: {premise} Claim: {hypothesis} The claim is {mask}.",
        "label_words": ("true", "unclear", "false"),
        "max_length": 256,
    },
    "mnli": {
        "template": "Given: {premise} Claim: {hypothesis} The claim is {mask}.",
        "label_words": ("true", "unclear", "false"),
        "max_length": 256,
    },
    "rte": {
        "template": "Given: {sentence1} Claim: {sentence2} The claim is {mask}.",
        "label_words": ("true", "unclear"),
        "max_length": 256,
        "num_test": 277,
    },
    "trec": {
        "template": "{text} The answer will be a kind of {mask}.",
        "label_words": ("acronym", "thing", "reason", "person", "place", "number"),
        "max_length": 128,
        "label_field": "coarse_label",
        "num_examples": 5 * 512 + 86,  # There are 86 questions about abbreviations.
        "num_test": 500,
    },
}

#: Tasks of OPT. The released code pads a batch to its longest text, up to 2048 tokens.
_TEXTS: dict[str, dict[str, Any]] = {
    "sst-2": {
        "kind": "choice",
        "template": f"{{sentence}} {_FILM}",
        "label_words": ("bad", "good"),
        "max_length": 128,
        "span_length": 2,
    },
    "boolq": {
        "kind": "choice",
        "template": "{passage} Somebody asks: {question}? In one word:",
        "label_words": ("no", "yes"),
        "max_length": 512,
        "span_length": 2,
    },
    "squad": {
        "kind": "generation",
        "template": "{context} Asked: {question} In the words of the text:",
        "max_length": 512,
        "span_length": 50,
    },
    "drop": {
        "kind": "generation",
        "template": "{passage} Asked: {question} In a word or a number:",
        "max_length": 1024,
        "span_length": 50,
    },
}

_ROBERTA: dict[str, Any] = {
    "kind": "prompt",
    "compute_dtype": "float32",
    "num_steps": 10_000,
    "batch_size": 64,
    "data_seeds": (42, 13, 21),
}
_LARGE: dict[str, Any] = {
    "learning_rate": 1e-6,
    "learning_rates": (1e-6,),
    "l2_clip_norm": 200.0,  # the released script's
    "l2_clip_norms": (50.0, 100.0, 150.0, 200.0, 250.0, 300.0, 400.0),
}
#: Figure 3, on SNLI. Its text names the step size 5e-6 and clips from 1 to 500; the points
#: between and the other step sizes are ours.
_BASE: dict[str, Any] = {
    "learning_rate": 5e-6,
    "learning_rates": (1e-6, 2e-6, 5e-6, 1e-5, 2e-5),
    "l2_clip_norm": 100.0,
    "l2_clip_norms": (1.0, 5.0, 10.0, 50.0, 100.0, 200.0, 500.0),
}
_OPT: dict[str, Any] = {
    "compute_dtype": "bfloat16",
    "num_steps": 20_000,
    "batch_size": 8,
    "num_examples": 1000,
    "code_num_examples": 1000,
    "data_seeds": (0, 29, 83),
    "learning_rate": 1e-7,  # the example's in the released code
    "learning_rates": (1e-6, 1e-7),
    "l2_clip_norm": 100.0,  # Ours: that example's, 300, is not among those tried.
    "l2_clip_norms": (10.0, 50.0, 100.0, 200.0),
}


def _classes(task: Mapping[str, Any]) -> dict[str, Any]:
    """Adds classes numbered from 0, as in the public copies, with 512 records of each."""
    count = len(task["label_words"])
    # The released code says 512 even where a class has fewer.
    sizes = {"num_examples": 512 * count, "code_num_examples": 512 * count}
    return {"classes": tuple(map(str, range(count)))} | sizes | dict(task)


def _answers(task: Mapping[str, Any]) -> dict[str, Any]:
    if task["kind"] == "generation":
        answers = {"label_field": None, "answer_field": "answers", "metric": "token_f1"}
        return answers | dict(task)
    return {"classes": ("0", "1")} | dict(task)


def _all() -> Iterable[Experiment]:
    for model, sizes in {"roberta-large": _LARGE, "roberta-base": _BASE}.items():
        for task, words in _PROMPTS.items():
            settings = _ROBERTA | sizes | _classes(words)
            yield Experiment(model=model, task=task, **settings)
    for model in ("opt-1.3b", "opt-2.7b", "opt-6.7b"):
        for task, words in _TEXTS.items():
            yield Experiment(model=model, task=task, **_OPT | _answers(words))


#: By name: ``EXPERIMENTS["roberta-large/sst-2"]``. The paper has no table for
#: ``roberta-base``, and Figure 3 for SNLI alone.
EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType({e.name: e for e in _all()})
