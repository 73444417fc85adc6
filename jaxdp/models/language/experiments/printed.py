"""Printed results of the DPZero paper about language models, as data.

Zhang et al., `DPZero <https://arxiv.org/abs/2310.09639>`_, 2024, Tables 2 to 5, 7, 9 and
11, and the text beside them. Nothing here was measured by this library.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Printed:
    """One figure of the paper: an accuracy or an F1 score.

    Attributes:
      table: the paper's number of the table, or ``"text"``.
      model: as in the names of the experiments.
      task: as in the names of the experiments.
      method: ``"DPZero"``, ``"MeZO"``, ``"DP-AdamW"`` and so on.
      epsilon: of the run, at delta 1e-5; infinity where nothing is private, 0 where
        nothing is learned.
      percent: the mean over three data seeds.
      standard_error: of that mean, in points; None where none was printed.
    """

    table: str
    model: str
    task: str
    method: str
    epsilon: float
    percent: float
    standard_error: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Time and memory of one step as the paper printed them, on one card of 24 GiB.

    Attributes:
      table: the paper's number of the table. Table 3 repeats some rows of Table 9.
      model: as in the names of the experiments.
      task: as in the names of the experiments.
      batch_size: of the step.
      method: as in :class:`Printed`; first-order methods name their implementation.
      seconds: of an iteration; None where not printed.
      mebibytes: of the card; None is out of memory.
      percent: accuracy, private runs at epsilon 2; None where not printed.
    """

    table: str
    model: str
    task: str
    batch_size: int
    method: str
    seconds: float | None
    mebibytes: int | None
    percent: float | None = None


#: Method, epsilon, and a column for each task: mean and standard error.
_TABLE_2 = """
method     epsilon  sst-2     sst-5     snli      mnli      rte       trec
AdamW      inf      93.1±0.3  56.6±0.3  86.4±0.8  81.4±0.9  83.6±1.6  95.9±0.2
DP-AdamW   6        91.6±1.2  49.0±0.3  81.5±1.4  76.3±0.9  77.3±1.1  89.9±0.8
DP-AdamW   2        90.5±1.5  47.5±0.5  74.6±1.0  70.3±0.8  72.8±0.9  85.0±0.5
LoRA       inf      93.3±0.4  55.3±1.0  85.9±0.7  82.2±0.7  84.2±0.4  94.6±0.4
DP-LoRA    6        91.0±1.3  48.8±0.5  81.0±1.5  72.8±1.8  74.7±1.3  89.2±0.8
DP-LoRA    2        90.2±1.2  47.1±0.4  74.7±1.6  65.7±0.9  69.2±1.1  83.2±2.3
MeZO       inf      92.5±0.3  50.8±0.8  80.4±0.6  69.2±0.3  72.8±1.0  88.9±0.1
DPZero     6        92.2±0.3  49.3±0.6  77.8±1.0  67.4±0.3  71.9±0.9  87.6±0.9
DPZero     2        91.8±0.1  47.1±0.9  73.6±0.9  62.7±0.9  70.4±0.7  82.0±1.6
zero-shot  0        79.0      35.5      50.2      48.8      51.4      32.0
"""
_TABLE_4 = """
method     epsilon  1.3b/sst-2 1.3b/boolq 2.7b/sst-2 2.7b/boolq 6.7b/sst-2 6.7b/boolq
MeZO       inf      88.2±0.9   63.2±0.8   91.9±0.5   65.3±1.3   93.0±0.2   67.4±2.3
DPZero     6        88.2±1.1   62.4±0.8   91.5±1.7   65.4±1.6   92.6±0.7   66.8±1.6
DPZero     2        86.8±1.7   61.6±1.1   90.5±0.9   63.7±0.7   90.6±1.3   63.7±0.7
zero-shot  0        53.6       45.3       56.3       47.7       61.2       59.4
"""
_TABLE_5 = """
method     epsilon  1.3b/squad 1.3b/drop  2.7b/squad 2.7b/drop  6.7b/squad 6.7b/drop
MeZO       inf      73.5±1.2   24.4±0.2   76.3±0.8   25.5±1.2   79.7±1.1   28.8±0.7
DPZero     6        72.6±0.8   24.7±1.0   75.7±1.5   24.6±0.5   79.5±0.9   28.4±1.3
DPZero     2        70.1±1.6   23.9±1.2   71.9±1.2   23.1±0.9   77.1±1.0   27.6±0.7
zero-shot  0        26.8       11.1       29.8       9.7        36.5       17.8
"""
_TABLE_7 = """
method          epsilon  sst-2     sst-5
DPZero-gaussian 6        92.2±0.3  49.3±0.6
DPZero-gaussian 2        91.8±0.1  47.1±0.9
DPZero-sphere   6        91.8±0.1  49.9±1.3
DPZero-sphere   2        91.5±0.5  47.4±1.3
"""
#: The paragraph on DPGD-0th in Appendix B.2.
_TEXT = """
method     epsilon  trec
DPGD-0th   2        67.0
"""


def _read(table: str, text: str, prefix: str) -> list[Printed]:
    """Reads the cells of a table; ``prefix`` and a column make ``model/task``."""
    (_, _, *columns), *rows = (line.split() for line in text.strip().splitlines())
    found: list[Printed] = []
    for method, epsilon, *cells in rows:
        for column, cell in zip(columns, cells, strict=True):
            model, task = f"{prefix}{column}".split("/")
            mean, _, error = cell.partition("±")
            printed = Printed(
                table=table,
                model=model,
                task=task,
                method=method,
                epsilon=float(epsilon),
                percent=float(mean),
                standard_error=float(error) if error else None,
            )
            found.append(printed)
    return found


#: Every accuracy and F1 score of language models that the paper printed.
PRINTED: tuple[Printed, ...] = (
    *_read("2", _TABLE_2, "roberta-large/"),
    *_read("4", _TABLE_4, "opt-"),
    *_read("5", _TABLE_5, "opt-"),
    *_read("7", _TABLE_7, "roberta-large/"),
    *_read("text", _TEXT, "roberta-large/"),
)

#: RoBERTa-large on SST-2: method and implementation, accuracy, seconds, MiB.
_TABLE_9 = """
AdamW-Li     93.1  1.25   15820
DP-AdamW-Li  90.5  2.12   17126
DP-AdamW-Bu  91.1  1.55   18372
AdamW-Yu     94.4  0.425  16960
DP-AdamW-Yu  92.3  2.33   21494
LoRA-Li      93.3  0.821  10366
DP-LoRA-Li   90.2  1.05   10496
LoRA-Yu      94.3  0.301  11512
DP-LoRA-Yu   91.3  0.332  11522
MeZO         92.5  0.345  2668
DPZero       91.8  0.347  2668
"""
_TABLE_11 = """
AdamW   opt-1.3b  -
AdamW   opt-2.7b  -
AdamW   opt-6.7b  -
AdamW   opt-13b   -
MeZO    opt-1.3b  7866
MeZO    opt-2.7b  11602
MeZO    opt-6.7b  20548
MeZO    opt-13b   -
DPZero  opt-1.3b  7866
DPZero  opt-2.7b  11602
DPZero  opt-6.7b  20548
DPZero  opt-13b   -
"""


def _costs() -> list[Cost]:
    on_sst2 = [
        Cost(
            table="9",
            model="roberta-large",
            task="sst-2",
            batch_size=64,
            method=method,
            seconds=float(seconds),
            mebibytes=int(memory),
            percent=float(percent),
        )
        for method, percent, seconds, memory in map(
            str.split, _TABLE_9.strip().splitlines()
        )
    ]
    on_boolq = [
        Cost(
            table="11",
            model=model,
            task="boolq",
            batch_size=8,
            method=method,
            seconds=None,
            mebibytes=None if memory == "-" else int(memory),
        )
        for method, model, memory in map(str.split, _TABLE_11.strip().splitlines())
    ]
    return on_sst2 + on_boolq


#: Seconds and memory of a step, as printed.
COSTS: tuple[Cost, ...] = tuple(_costs())
