r"""A budget above the run: what all releases from one data set may cost together.

A budget is a folder with one file, ``budget.jsonl``: a header with the total, and a line
for each release, appended and synchronised with the disk *before* it is made. What is
reserved is spent, whatever becomes of the process. A line counts when its line feed is
written; a torn last line is of a process that never began its release. Public: it holds
nothing that depends on data.

A run with a ledger that is killed before it began is not charged again when it is started
anew in its folder. Its writes, in their order, each on the disk before the next:

1. its random name, in ``secret/reserved`` of its folder;
2. its reservation under that name;
3. ``{"begun": name}`` here, under the budget's lock and once for each name;
4. its ledger; what it releases comes after that.

Killed before 1 or 2, nothing was reserved. Between 2 and 3, nothing was released and the
next start finds that the reservation stands. Between 3 and 4, the name is used up and the
next start is charged again: it looks as if a copy of the folder had the ledger. After 4
the run is resumed, which reserves nothing unless it is a new attempt. Whoever else has the
same name, by a race or in a copy of the folder, fails at 3. So no reservation begins two
runs. (Systems without locks charge every start.)

Which runs follow may depend on what earlier ones released, and so may their noise.
Composition theorems for numbers that are fixed beforehand do not cover that. Those of
*privacy filters* do: sums against caps that are fixed when the budget is made.

* ``"basic"``: the epsilons add up, and so do the deltas (Rogers et al.). Any release, each
  at the epsilon of its own best accountant.
* ``"gaussian"``: squares of mu add up (Smith & Thakurta): many runs cost about the root of
  their number. Gaussian sums without sampling alone, whose mu is exact.
* ``"renyi"``: Renyi divergences of one order add up (Feldman & Zrnic), which is chosen when
  the budget is made: that of the largest Gaussian release that fits. Sampled runs, too.

Why divergences add up: let :math:`\rho_t` bound the divergence of order :math:`\alpha` of
step t, given all that was released before, on which it may depend. Under the law Q of one
data set the product of the steps' :math:`(P/Q)^\alpha e^{-(\alpha-1)\rho_t}` has an
expectation of at most 1. The sum of the :math:`\rho_t` never passes its cap B, so that
:math:`\mathbb E_Q (P/Q)^\alpha \le e^{(\alpha-1)B}`. To choose the order afterwards would
take a union bound. B is the divergence that implies the total in its conversion to epsilon,

.. math:: \varepsilon = B + \log(1 - 1/\alpha) - \frac{\log(\delta\alpha)}{\alpha - 1}.

The bounds of each step are in :mod:`jaxdp.accounting.renyi`. Runs may go on at the same
time: filters of one order hold for interleaved steps as well (Haney et al.).

What the integer samplers of the noise are away from their law is a sum with a cap of its
own.

References:
  Rogers, Roth, Ullman & Vadhan, `Privacy Odometers and Filters: Pay-as-you-Go Composition
  <https://arxiv.org/abs/1605.08294>`_, 2016. Smith & Thakurta, `Fully Adaptive Composition
  for Gaussian Differential Privacy <https://arxiv.org/abs/2210.17520>`_, 2022. Feldman &
  Zrnic, `Individual Privacy Accounting via a Renyi Filter
  <https://arxiv.org/abs/2008.11193>`_, 2021. Haney et al., `Concurrent Composition for
  Interactive Differential Privacy with Adaptive Privacy-Loss Parameters
  <https://arxiv.org/abs/2309.05901>`_, 2023.
"""

import contextlib
import json
import math
import os
import pathlib
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Self, get_args

from jaxdp import accounting
from jaxdp.core import validate
from jaxdp.core.types import Relation
from jaxdp.mechanism.plan import Plan
from jaxdp.training import ledger

FILE = "budget.jsonl"
#: Budgets of format 1 have no id, and their reservations name no run.
FORMAT, _READ = 2, (1, 2)

Composition = Literal["basic", "gaussian", "renyi"]
_UNITS = ("record", "user")
#: Under which relation of dp-accounting sampled events are stated, and all others are.
_STATED = {
    "replace_one": "REPLACE_ONE",
    "zero_out": "REPLACE_SPECIAL",
    "add_or_remove": "ADD_OR_REMOVE_ONE",
}
_UNSAMPLED, _SAMPLED = "ADD_OR_REMOVE_ONE", re.compile("Sampled|Subsampled")
#: Of the total, the most that the samplers of Gaussian noise may take.
_SAMPLERS = 1e-3
#: Largest epsilon of a budget. Far beyond it, what samplers leave of delta rounds to zero.
_MOST = 1000.0


class Reservation(NamedTuple):
    """Cost of one release, as it stands in a budget's file. Public."""

    what: str
    cost: dict[str, float]  # what it adds to each sum
    epsilon: float  # of this release alone, at ``delta``
    delta: float
    run: str = ""  # name of a run with a ledger, as in its header


class _Content(NamedTuple):
    header: dict[str, Any]
    reservations: tuple[Reservation, ...]
    begun: frozenset[str]  # names of runs whose reservations are used up
    size: int  # bytes of the complete lines

    def sums(self) -> dict[str, float]:
        names = self.header["caps"]
        return {
            name: math.fsum(each.cost[name] for each in self.reservations)
            for name in names
        }

    def stands(self, asked: Reservation) -> bool:
        """Returns True if a run has reserved just this under its name, and never began."""
        if not asked.run or asked.run in self.begun or ledger.fcntl is None:
            return False
        return any(
            (x.run, x.cost) == (asked.run, asked.cost) for x in self.reservations
        )


class Budget:
    """Budget of all releases from one data set: reserved first, and refused beyond it.

    One budget must stand for one data set, and for all that is released from it. Nothing
    tells whether two budgets are about the same records: a budget holds nothing of them.

    Attributes:
      folder: where ``budget.jsonl`` is.

    Example:
      >>> import tempfile
      >>> import jaxdp
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=1000, num_steps=20, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=2.0, smoothing_radius=1e-3,
      ... ).calibrate(epsilon=2.0, delta=1e-6)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     budget = jaxdp.Budget.create(
      ...         folder, epsilon=3.0, delta=1e-5, relation="replace_one"
      ...     )
      ...     _ = budget.reserve(plan, what="first run")
      ...     left = budget.left()
      ...     try:
      ...         budget.reserve(plan, what="second run")
      ...     except ValueError as error:
      ...         print("refused")
      refused
      >>> round(left["epsilon"], 2)
      1.0
    """

    def __init__(self, folder: str | os.PathLike[str]):
        """Opens a budget; ValueError if there is none in the folder."""
        self.folder = pathlib.Path(folder)
        self._read()

    def __repr__(self) -> str:
        left = ", ".join(f"{name}={x:.6g}" for name, x in self.left().items())
        return f"Budget({str(self.folder)!r}, left: {left})"

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        *,
        epsilon: float,
        delta: float,
        relation: Relation,
        unit: str = "record",
        composition: Composition = "basic",
    ) -> Self:
        """Creates a budget in a folder that has none.

        Args:
          folder: made if missing.
          epsilon: > 0 and at most 1000, of all releases together.
          delta: in (0, 1), of all releases together.
          relation: the neighbouring relation, that of every plan.
          unit: ``"record"`` or ``"user"`` (:func:`jaxdp.by_user`).
          composition: ``"basic"``, ``"gaussian"`` or ``"renyi"``; see
            :mod:`jaxdp.training.budgets`.

        Raises:
          ValueError: a number out of range, or a folder that has a budget.

        Example:
          >>> import tempfile
          >>> import jaxdp
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     budget = jaxdp.Budget.create(
          ...         folder, epsilon=8.0, delta=1e-6, relation="zero_out"
          ...     )
          ...     spent = budget.spent()
          >>> spent
          {'epsilon': 0.0, 'delta': 0.0}
        """
        validate.positive(epsilon=epsilon)
        if epsilon > _MOST:
            raise ValueError(f"epsilon must be at most {_MOST:g}, got {epsilon!r}")
        validate.probability(delta=delta)
        validate.one_of(get_args(Relation), relation=relation)
        validate.one_of(_UNITS, unit=unit)
        validate.one_of(get_args(Composition), composition=composition)
        header = {
            "budget": FORMAT,
            "id": secrets.token_hex(16),
            "epsilon": float(epsilon),
            "delta": float(delta),
            "relation": relation,
            "unit": unit,
            "composition": composition,
            **_rules(epsilon, delta, composition),
        }
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with open(path / "lock", "a+b") as file, _locked(file):
            if (path / FILE).exists():
                raise ValueError(f"budget must be a new one, but {str(path)!r} has one")
            ledger.replace(path / FILE, json.dumps(header).encode() + b"\n")
        return cls(path)

    @property
    def header(self) -> dict[str, Any]:
        """Totals, relation, unit and composition, as they stand in the file.

        With ``"renyi"`` the order of the divergences, too.
        """
        return self._read().header

    @property
    def id(self) -> str:
        """Random id, which ledgers of its runs name; "" for a budget of format 1."""
        return self.header.get("id", "")

    @property
    def reservations(self) -> tuple[Reservation, ...]:
        """All that was reserved, in its order."""
        return self._read().reservations

    def spent(self) -> dict[str, float]:
        """Returns the epsilon that is spent, and the delta at which it is.

        With ``"renyi"`` the first release shows more than it takes of what is left: a sum
        of divergences implies an epsilon above itself, by a number that releases share.

        Example:
          >>> import tempfile
          >>> import jaxdp
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     jaxdp.Budget.create(
          ...         folder, epsilon=8.0, delta=1e-6, relation="zero_out"
          ...     ).spent()
          {'epsilon': 0.0, 'delta': 0.0}
        """
        content = self._read()
        sums, header = content.sums(), content.header
        if header["composition"] == "basic":
            return sums
        if not content.reservations:
            return {"epsilon": 0.0, "delta": 0.0}
        left = (header["delta"] - sums["sampler_delta"]) * math.exp(
            -sums["sampler_epsilon"]
        )
        if header["composition"] == "renyi":
            from jaxdp.accounting import renyi

            order = header["order"]
            spent = renyi.implied(sums["renyi_divergence"], left, order)
        else:
            spent = accounting.gaussian_epsilon(math.sqrt(sums["mu_squared"]), left)
        total = spent + sums["sampler_epsilon"]
        return {"epsilon": total, "delta": header["delta"]}

    def left(self) -> dict[str, float]:
        """Returns what each sum may still grow by.

        A sum of Renyi divergences is in units of epsilon: one unit of it adds one unit to
        the epsilon.

        Example:
          >>> import tempfile
          >>> import jaxdp
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     jaxdp.Budget.create(
          ...         folder, epsilon=8.0, delta=1e-6, relation="zero_out"
          ...     ).left()
          {'epsilon': 8.0, 'delta': 1e-06}
        """
        content = self._read()
        sums, caps = content.sums(), content.header["caps"]
        return {name: max(caps[name] - sums[name], 0.0) for name in caps}

    def reserve(
        self,
        release: Plan | accounting.Guarantee,
        *,
        what: str = "",
        delta: float | None = None,
        relation: Relation | None = None,
        unit: str = "record",
    ) -> Reservation:
        """Reserves what a release costs; call it before the release is made.

        Args:
          release: a plan, or the guarantee of anything else that is released.
          what: what it is, for whoever reads the file; public.
          delta: at which it is charged; by default the plan's.
          relation: of a guarantee, the neighbouring relation under which it holds.
          unit: ``"record"`` or ``"user"``, that of the release.

        Returns:
          What was written.

        Raises:
          ValueError: another relation or unit than the budget's, a release that its
            composition does not cover, or one that would pass the total; nothing is
            reserved then.

        Example:
          >>> import tempfile
          >>> import jaxdp
          >>> from jaxdp import accounting
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     budget = jaxdp.Budget.create(
          ...         folder, epsilon=2.0, delta=1e-6, relation="zero_out",
          ...         composition="gaussian",
          ...     )
          ...     mean = accounting.full_batch_gaussian(10.0, 1, "zero_out")
          ...     for _ in range(9):
          ...         made = budget.reserve(mean, delta=1e-6, relation="zero_out")
          ...     spent = budget.spent()["epsilon"]
          >>> spent < 9 * made.epsilon / 2
          True
        """
        asked = self._asked(release, what, delta, relation, unit)
        self._append(asked._asdict(), lambda content: _check_room(content, asked))
        return asked

    def _append(
        self, fields: dict[str, Any], check: Callable[[_Content], None]
    ) -> None:
        """Appends a line, on the disk when this returns, if the content passes a check."""
        with self._held() as file:
            content = self._read()
            check(content)
            file.truncate(content.size)  # A torn line was never one.
            file.seek(content.size)
            file.write(json.dumps(fields).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            if not self._names(file):
                raise ValueError(
                    f"budget must stay where it is, got {str(self.folder)!r}, whose "
                    f"{FILE} was exchanged while a line was written: it may lack that line"
                )

    @contextlib.contextmanager
    def _held(self) -> Iterator[Any]:
        """Opens the budget's file and locks it, for this process alone."""
        while True:
            self._read()  # Says what is wrong with a folder that is none.
            with open(self.folder / FILE, "r+b") as file, _locked(file):
                if self._names(file):  # Nobody exchanged it meanwhile.
                    yield file
                    return

    def _names(self, file: Any) -> bool:
        """Returns True if an open file is the one that has the budget's name."""
        try:
            there = os.stat(self.folder / FILE)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(file.fileno()), there)

    def check(
        self,
        plan: Plan,
        folder: str | os.PathLike[str] | None = None,
        *,
        unit: str = "record",
    ) -> None:
        """Raises what a run of a plan would now in its budget; reserves nothing.

        Args:
          plan: the plan.
          folder: of the run's ledger, where a reservation may stand that was not used.
          unit: ``"record"`` or ``"user"``.

        Example:
          >>> import tempfile
          >>> import jaxdp
          >>> plan = jaxdp.plans.DPZero(
          ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
          ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
          ... ).with_noise(noise_multiplier=2.0, delta=1e-2)
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     jaxdp.Budget.create(
          ...         folder, epsilon=9.0, delta=0.1, relation="replace_one"
          ...     ).check(plan)
        """
        asked = self._asked(plan, plan.family, None, None, unit)
        content = self._read()
        if not content.stands(asked._replace(run=ledger.reserved(folder))):
            _check_room(content, asked)

    def _asked(
        self,
        release: Any,
        what: Any,
        delta: float | None,
        relation: Relation | None,
        unit: str,
    ) -> Reservation:
        validate.instance(str, what=what)
        header = self.header
        if isinstance(release, Plan):
            delta = release.delta if delta is None else delta
            relation = release.relation
            release = accounting.Guarantee(release.event, release.event_relation)
        elif not isinstance(release, accounting.Guarantee):
            raise TypeError(
                f"release must be a plan or an accounting.Guarantee, got {release!r}"
            )
        elif relation is not None:
            _check_relation(release, relation)
        for name, got in (("relation", relation), ("unit", unit)):
            if got != header[name]:
                raise ValueError(
                    f"{name} must be the budget's, {header[name]!r}, got {got!r}"
                )
        if delta is None:
            raise ValueError("delta must be given where the plan has none, got None")
        event, event_relation = release
        spent = float(accounting.epsilon(event, event_relation, delta))
        cost = {"epsilon": spent, "delta": float(delta)}
        if header["composition"] != "basic":
            cost = _cost(release, header)
        if not all(0 <= x < math.inf for x in (spent, *cost.values())):
            raise ValueError(
                "release must cost a finite epsilon >= 0, got one without noise, or of a "
                "negative count"
            )
        return Reservation(what, cost, spent, float(delta))

    def _read(self) -> _Content:
        path = self.folder / FILE
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ValueError(
                "budget must be a folder that jaxdp.Budget.create or jaxdp budget made, "
                f"got {str(self.folder)!r}: {error}"
            ) from error
        text = text[: text.rfind(b"\n") + 1]
        lines = text.split(b"\n")[:-1]
        found: list[Reservation] = []
        begun: set[str] = set()
        try:
            header = json.loads(lines[0])
            if header["budget"] not in _READ:
                raise ValueError(f"it has format {header['budget']!r}, not {FORMAT}")
            _check_numbers(header["caps"])
            for line in lines[1:]:
                fields = json.loads(line)
                if "begun" in fields:
                    begun.add(fields["begun"])
                    continue
                one = Reservation(**fields)
                _check_numbers({name: one.cost[name] for name in header["caps"]})
                found.append(one)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"budget must be as it was written, got {str(path)!r}, which is broken "
                f"after {len(found)} reservations: {error!r}"
            ) from error
        return _Content(header, tuple(found), frozenset(begun), len(text))


# --- runs with a ledger -------------------------------------------------------------


def reserve_run(
    budget: Budget, plan: Plan, folder: str | os.PathLike[str] | None, *, unit: str
) -> str:
    """Reserves what a run costs, unless its reservation stands; returns the run's name.

    Without a folder, in which a later start would find its name, it has none: "".
    """
    if folder is None:
        budget.reserve(plan, what=plan.family, unit=unit)
        return ""
    what = f"{plan.family} in {os.fspath(folder)}"
    asked = budget._asked(plan, what, None, None, unit)
    asked = asked._replace(run=ledger.reserved(folder))
    if not budget._read().stands(asked):
        asked = asked._replace(run=ledger.reserve(folder))
        budget._append(asked._asdict(), lambda content: _check_room(content, asked))
    return asked.run


def begin(budget: Budget, run: str) -> None:
    """Marks a run's reservation as used before its ledger is made; ValueError if it was."""

    def check(content: _Content) -> None:
        if run in content.begun or all(x.run != run for x in content.reservations):
            raise ValueError(
                f"budget must have a reservation of the run {run} that no run has used, "
                f"got {str(budget.folder)!r} without: another process began in the run's "
                "folder, or in a copy of it; start it again"
            )

    budget._append({"begun": run}, check)


def named_by(header: dict[str, Any]) -> str | None:
    """Returns the id of the budget of a run, by its ledger's header; None without one."""
    if "budget" in header:
        return header["budget"]
    # Ledgers of earlier versions note only that there was a budget, which had no id.
    return "" if header["note"].get("budget") else None


def reserve_attempt(
    budget: Budget | None, header: dict[str, Any], plan: Plan, *, unit: str
) -> None:
    """Reserves the plan of a run once more, for an attempt with new noise.

    Nothing here tells what copies of its folder released, each under its own noise. So the
    attempt is charged as a run.

    Raises:
      ValueError: another budget than the one in which the run was reserved, or none; or
        one that has no room.
    """
    was, now = named_by(header), None if budget is None else budget.id
    if now != was:
        known = {None: "none", "": "one without an id"}
        raise ValueError(
            "budget must be that in which the run was reserved, for a new attempt: "
            f"{known.get(was, was)}; got {known.get(now, now)}"
        )
    if budget is not None:
        budget.reserve(plan, what=f"new attempt of {header['run']}", unit=unit)


# --- sums and caps -----------------------------------------------------------------


def _check_relation(release: accounting.Guarantee, relation: Relation) -> None:
    """Requires a guarantee that can have been stated under a relation.

    Of events without sampling the relation is in the sensitivity: nothing tells it.
    """
    validate.one_of(_STATED, relation=relation)
    allowed = {_STATED[relation]}
    if not _SAMPLED.search(repr(release.event)):
        allowed.add(_UNSAMPLED)
    if release.event_relation.name not in allowed:
        raise ValueError(
            f"relation must be the guarantee's, which is stated under "
            f"{release.event_relation.name}, got {relation!r}"
        )


def _check_room(content: _Content, asked: Reservation) -> None:
    """Requires that no sum passes its cap."""
    for name, cap in content.header["caps"].items():
        costs = [each.cost[name] for each in content.reservations]
        if not math.fsum([*costs, asked.cost[name]]) <= cap:
            raise ValueError(
                f"budget must have room for {asked.what or 'the release'}: of {name} it "
                f"has {max(cap - math.fsum(costs), 0.0):.6g} of {cap:.6g} left, and "
                f"{asked.cost[name]:.6g} is asked for"
            )


def _check_numbers(named: dict[str, float]) -> None:
    for name, x in named.items():
        if not (isinstance(x, int | float) and math.isfinite(x) and x >= 0):
            raise ValueError(f"{name} must be a finite number >= 0, got {x!r}")


def _rules(epsilon: float, delta: float, composition: Composition) -> dict[str, Any]:
    """Returns the caps, which sums of costs may not pass, and the order of divergences."""
    if composition == "basic":
        return {"caps": {"epsilon": float(epsilon), "delta": float(delta)}}
    sampler, missed = _SAMPLERS * epsilon, _SAMPLERS * delta
    samplers = {"sampler_epsilon": sampler, "sampler_delta": missed}
    left = epsilon - sampler, (delta - missed) * math.exp(-sampler)
    if composition == "gaussian":
        return {"caps": {"mu_squared": accounting.gaussian_mu(*left) ** 2} | samplers}
    from jaxdp.accounting import renyi  # With dp-accounting: loaded where it is needed.

    order = renyi.best_order(*left)
    most = renyi.total(*left, order)
    if not most > 0:
        raise ValueError(
            f"epsilon must be larger for a sum of Renyi divergences at delta={delta!r}, "
            f"got {epsilon!r}, at which nothing fits at any order up to {renyi.ORDERS[-1]}"
        )
    caps = {"renyi_divergence": most} | samplers
    return {"order": order, "caps": caps}


def _cost(release: accounting.Guarantee, header: dict[str, Any]) -> dict[str, float]:
    """Returns what a release adds to the sums of a composition that is not basic."""
    from jaxdp.accounting import lattice, renyi, spending

    sampler, missed = accounting.sampler_error(release.event)
    samplers = {"sampler_epsilon": sampler, "sampler_delta": missed}
    if header["composition"] == "renyi":
        event = lattice.ideal(release.event)
        found = renyi.divergence(event, release.event_relation, header["order"])
        return {"renyi_divergence": found} | samplers
    name, mu, accountant = spending.account(*release)
    if accountant is not None:
        raise ValueError(
            "release must be Gaussian sums without sampling for a budget whose composition "
            f"is 'gaussian', got one that {name} accounts: make one with 'renyi' or 'basic'"
        )
    return {"mu_squared": mu**2} | samplers


@contextlib.contextmanager
def _locked(file: Any) -> Iterator[None]:
    """Waits until no other process has the file, and keeps them waiting."""
    if ledger.fcntl is not None:
        ledger.fcntl.flock(file, ledger.fcntl.LOCK_EX)
    yield
