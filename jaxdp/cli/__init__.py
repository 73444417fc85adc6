"""Command line: ``train``, ``finetune``, ``epsilon``, ``calibrate``, and so on.

A wrong argument gives one line on standard error and exit code 2, before a new run spends
or writes anything; Ctrl-C gives one line and exit code 130, SIGTERM and SIGUSR1 (in a run,
when a chunk is done) one line and exit code 75, as do processes that wait in vain for
others. A traceback is a bug of ours.
Functions of this package raise a ``UsageError`` in one sentence that names the option.
"""

import argparse
import functools
import importlib
import os
import pathlib
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from jaxdp import __version__
from jaxdp.cli import config, options, parsing
from jaxdp.cli.parsing import Preempted, UsageError

#: Exit code of a run that a signal stopped, or to which a process did not come: EX_TEMPFAIL
#: of sysexits.h, "try again". (143 would also be that of a process that SIGTERM killed
#: before it could take it.)
PREEMPTED = 75

_HELP = ("-h", "--help")
_COMMANDS = ("train", *options.COMMANDS)
#: Modules of the commands that are not called like one.
_MODULES = {"epsilon": "budget", "calibrate": "budget", "budget": "shared_budget"}
_OF_TRAIN = """\
"recipe" stands for a default that is fixed for each data set (jaxdp/cli/recipes.py), or,
for a file, follows from the budget and the held-out records, as in jaxdp recommend.
Metrics are computed on the held-out records only, which count as public.

jaxdp train ALGORITHM [OPTIONS], where ALGORITHM has options of its own:
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser that ``shtab`` writes a shell's completions from."""
    return parsing.together("jaxdp", options.COMMANDS, options.ALGORITHMS)


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code.

    Args:
      args: words after ``jaxdp``; those of the process if None.
    """
    words = list(sys.argv[1:] if args is None else args)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = functools.partial(_warn, set())
            code = _run(words)
        sys.stdout.flush()  # Here a closed pipe is met, not at exit.
        return code
    except UsageError as error:
        return _fail(str(error), 2)
    except Preempted as error:
        return _fail(str(error), PREEMPTED)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # Whoever read the output has enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as done:  # After --help.
        return int(done.code or 0)


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"jaxdp: {line}", file=sys.stderr)
    return code


def _warn(shown: set[str], message: Warning | str, *where: Any) -> None:
    """Shows a warning once, in one line, without the place in the code that Python adds."""
    del where
    if str(message) not in shown:
        _fail(f"warning: {message}", 0)
    shown.add(str(message))


def _run(words: list[str]) -> int:
    known = ", ".join(_COMMANDS)
    if not words:
        raise UsageError(f"a command must be given, one of {known}; see jaxdp --help")
    name, *rest = words
    if name in _HELP:
        print(_overview())
        return 0
    if name == "--version":
        print(f"jaxdp {__version__}")
        return 0
    if name not in _COMMANDS:
        raise UsageError(f"the command, first, must be one of {known}; got {name!r}")
    if name == "launch":
        at = rest.index("--") if "--" in rest else len(rest)
        command = parsing.parse(options.Launch, rest[:at], "jaxdp launch", "")
        parsing.check(command)
        return importlib.import_module("jaxdp.cli.launch").run(command, rest[at + 1 :])
    if name == "train":
        command = _train(rest)
    else:
        command = parsing.parse(options.COMMANDS[name], rest, f"jaxdp {name}", "")
    # Imported late: training brings flax and matplotlib, which the others do without.
    module = importlib.import_module(f"jaxdp.cli.{_MODULES.get(name, name)}")
    return module.run(command) or 0


def _overview() -> str:
    """Returns the help of all commands."""
    about = {"train": "Train on a data set, by one of several algorithms."}
    about |= {name: _summary(kind) for name, kind in options.COMMANDS.items()}
    return (
        "usage: jaxdp COMMAND [OPTIONS]\n\n"
        f"Differentially private optimisation in JAX.\n\n{_listed(about)}\n\n"
        "jaxdp COMMAND --help lists a command's options; --config FILE.toml reads them\n"
        "from a file, whose keys are their names.\n\n"
        "Exit code 0: done. 1: an audit failed, a replay differs, or a bug. 2: a wrong\n"
        "argument or file. 75: stopped by SIGTERM or SIGUSR1, or others did not come:\n"
        "with --resume auto it goes on. 130: interrupted. 141: nobody reads the output."
    )


def _summary(kind: type) -> str:
    return str(kind.__doc__).partition("\n")[0]


def _listed(about: dict[str, str]) -> str:
    return "\n".join(f"  {name:<11}{said}".rstrip(".") for name, said in about.items())


def _train(words: list[str]) -> options.Train:
    """Returns the options of the algorithm that is named first, or by --algorithm."""
    name, words = _algorithm(words)
    file = _config(words)
    said = file or {}
    if name is None and "algorithm" in said:
        name = str(said["algorithm"])
    if name is None and not {*_HELP} & {*words}:
        given = said | parsing.some(options.Train, words)
        name = _recorded(given) if given.get("resume") else None
    name = options.DEFAULT_ALGORITHM if name is None else name
    if name not in options.ALGORITHMS:
        known = ", ".join(options.ALGORITHMS)
        raise UsageError(f"--algorithm must be one of {known}; got {name!r}")
    kinds = options.ALGORITHMS
    more = _OF_TRAIN + _listed({n: _summary(kind) for n, kind in kinds.items()})
    prog, aside = f"jaxdp train {name}", ("algorithm",)
    return parsing.parse(kinds[name], words, prog, more, aside, file)


def _config(words: list[str]) -> dict[str, Any] | None:
    """Returns the content of the file that ``--config`` names; None without one."""
    if {*_HELP} & {*words}:
        return None
    path = parsing.once(parsing.some(options.Train, words).get("config"))
    if path is None:
        return None
    with parsing.naming(path):
        return config.read(path)


def _algorithm(words: list[str]) -> tuple[str | None, list[str]]:
    """Returns the algorithm that is named, if any, and the other words."""
    if words and not words[0].startswith("-"):
        return words[0], words[1:]
    for i, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option == "--algorithm":
            after = i + 1 if equals else i + 2
            if not equals:
                value = words[i + 1] if i + 1 < len(words) else "nothing"
            return value, words[:i] + words[after:]
    return None, words


def _recorded(given: dict[str, Any]) -> str | None:
    """Returns the algorithm of the run that is to go on, if there is one."""
    from jaxdp.cli import prepare, record

    known = {name: given[name] for name in ("out", "dataset") if name in given}
    out = prepare.out_of(options.Train(**known))
    return record.algorithm_of(pathlib.Path(str(out)))
