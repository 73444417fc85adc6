"""Every planted fault is flagged: exit code 1 of ``jaxdp audit``, or a test, in a copy."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.auditing.mutations import (
    MUTATIONS,
    ROOT,
    Auditor,
    Mutation,
    auditor,
    faulty,
    with_tests,
)

AUDITED = [m for m in MUTATIONS if not m.test]
TESTED = [m for m in MUTATIONS if m.test]


@pytest.fixture(scope="module")
def audited() -> Iterator[Auditor]:
    with auditor() as audited:
        yield audited


@pytest.mark.slow  # As each below: a process that imports the package, and compiles.
def test_the_copy_passes_as_it_is(audited: Auditor) -> None:
    code, answer = audited(None, "full")
    assert code == 0
    assert 0 < answer["epsilon_lower"] < answer["epsilon"]
    assert answer["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("mutation", AUDITED, ids=str)
def test_planted_fault_is_flagged(mutation: Mutation, audited: Auditor) -> None:
    code, answer = audited(mutation, mutation.plan)
    assert code == 1
    assert not answer["passed"]
    if mutation.lattice:
        answer = answer["lattice"]
        assert answer["flagged"]
    assert answer["epsilon_lower"] > answer["epsilon"]


@pytest.mark.slow
def test_tests_that_find_faults_pass_in_a_copy_as_it_is() -> None:
    code, said = with_tests(None, *(m.test for m in TESTED))
    assert code == 0, said


@pytest.mark.slow
@pytest.mark.parametrize("mutation", TESTED, ids=str)
def test_a_test_fails_under_a_planted_fault(mutation: Mutation) -> None:
    code, said = with_tests(mutation, mutation.test)
    assert code == 1, said


@pytest.mark.parametrize("mutation", TESTED, ids=str)
def test_tests_that_find_faults_are_there(mutation: Mutation) -> None:
    path, name = mutation.test.split("::")
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
    assert not mutation.plan


def test_faults_texts_are_there_once_and_use_names_that_exist(tmp_path: Path) -> None:
    for number, mutation in enumerate(MUTATIONS):
        for path, text in faulty(mutation).items():
            name = f"{number}_{path.replace('/', '_')}"
            (tmp_path / name).write_text(text, encoding="utf-8")
    command = "ruff check --isolated --select F821,F822,F823 --output-format concise ."
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=tmp_path, capture_output=True
    )
    assert done.returncode == 0, done.stdout.decode()


def test_a_fault_whose_text_is_gone_is_an_error() -> None:
    lost = Mutation("lost", "jaxdp/core/keys.py", "no such text", "", "full")
    with pytest.raises(ValueError, match="once, but has it 0 times"):
        faulty(lost)
