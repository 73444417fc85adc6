"""Every planted fault is flagged: exit code 1 of ``jaxdp audit`` in a copy."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.auditing.mutations import MUTATIONS, Mutation, audited, faulty

Answer = tuple[int, dict[str, Any]]


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[Mutation | None, Future[Answer]]]:
    """All audits, two at a time. Each is a process that imports and compiles: 5 s."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [(None, "full"), *((m, m.plan) for m in MUTATIONS)]
        yield {m: pool.submit(audited, m, plan) for m, plan in jobs}
        pool.shutdown(cancel_futures=True)


@pytest.mark.slow
def test_the_copy_passes_as_it_is(answers: Any) -> None:
    code, answer = answers[None].result()
    assert code == 0
    assert 0 < answer["epsilon_lower"] < answer["epsilon"]
    assert answer["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_planted_fault_is_flagged(mutation: Mutation, answers: Any) -> None:
    code, answer = answers[mutation].result()
    assert code == 1
    assert not answer["passed"]
    if mutation.lattice:
        answer = answer["lattice"]
        assert answer["flagged"]
    assert answer["epsilon_lower"] > answer["epsilon"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_fault_s_text_is_there_once_and_becomes_python(mutation: Mutation) -> None:
    for path, text in faulty(mutation).items():
        compile(text, path, "exec")


def test_a_fault_whose_text_is_gone_is_an_error() -> None:
    lost = Mutation("lost", "jaxdp/core/keys.py", "no such text", "", "full")
    with pytest.raises(ValueError, match="once, but has it 0 times"):
        faulty(lost)
