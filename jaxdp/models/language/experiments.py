"""The language-model experiments of the DPZero paper, as settings that can be run.

:data:`EXPERIMENTS` holds one :class:`Experiment` for each model and task of Tables 2, 4, 5,
7, 8 and 10 and of Figure 3 of `Zhang et al. <https://arxiv.org/abs/2310.09639>`_, 2024,
read from ``experiments.toml``, which holds the printed figures too. Templates and label
words are our own: the paper prints none, and those of its code come from MeZO, whose
repository has no licence file.
"""

import dataclasses
import pathlib
import tomllib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from jaxdp.dpzero.plan import DirectionLaw

#: Tables of the file: settings, and what the paper printed.
TABLES: Mapping[str, Any] = tomllib.loads(
    pathlib.Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
#: Options of ``jaxdp finetune`` that a recipe sets, and those of another name here.
_TAKEN = (
    *("task", "template", "label_field", "answer_field", "labels", "label_words"),
    *("max_length", "span_length", "compute_dtype", "num_steps", "batch_size"),
    *("l2_clip_norm", "smoothing_radius", "learning_rate", "delta"),
)
_SETTINGS = {"task": "kind", "labels": "classes"}


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

    Example:
      >>> from jaxdp.models.language.experiments import EXPERIMENTS
      >>> experiment = EXPERIMENTS["roberta-large/sst-2"]
      >>> experiment.kind, experiment.label_words, experiment.num_steps > 0
      ('prompt', ('bad', 'good'), True)
      >>> sorted(experiment.options)[:3]
      ['batch_size', 'compute_dtype', 'delta']
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
        """Key in :data:`EXPERIMENTS`, ``model/task``."""
        return f"{self.model}/{self.task}"

    @property
    def options(self) -> dict[str, Any]:
        """Options of a run, by their names in ``jaxdp finetune``."""
        found = {name: getattr(self, _SETTINGS.get(name, name)) for name in _TAKEN}
        found["direction"] = self.directions[0]
        return {name: value for name, value in found.items() if value not in (None, ())}


def _all() -> Iterable[Experiment]:
    for family in (TABLES["roberta"], TABLES["opt"]):
        for model, sizes in family["models"].items():
            for task, words in family["tasks"].items():
                settings = family["shared"] | sizes | words
                if "answer_field" in settings:
                    settings["label_field"] = None
                frozen: dict[str, Any] = {
                    name: tuple(value) if isinstance(value, list) else value
                    for name, value in settings.items()
                }
                yield Experiment(model=model, task=task, **frozen)


#: By name: ``EXPERIMENTS["roberta-large/sst-2"]``. The paper has no table for
#: ``roberta-base``, and Figure 3 for SNLI alone.
EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType({e.name: e for e in _all()})
