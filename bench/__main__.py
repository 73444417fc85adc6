"""``python -m bench NAME [--quick] [--json FILE] [--out DIR]``; no name runs them all."""

import argparse
import importlib
import inspect
import pathlib
import pkgutil
import sys

import bench
from bench import _harness


def names() -> list[str]:
    """The benchmarks: modules here that begin with a letter, but for ``problems``."""
    found = (m.name for m in pkgutil.iter_modules(bench.__path__))
    return sorted(n for n in found if not n.startswith("_") and n != "problems")


def main(argv: list[str] | None = None) -> int:
    """Runs benchmarks, prints their tables and writes their JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", nargs="?", choices=names(), help="default: all of them")
    parser.add_argument("--quick", action="store_true", help="at most 60 s each")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write rows")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="draw plots")
    args = parser.parse_args(argv)
    if args.json and not args.name:
        parser.error("argument --json: needs NAME, the benchmark whose rows it holds")
    for folder in (args.out, args.json and args.json.parent):
        if folder:  # Now, and not when the rows are there.
            folder.mkdir(parents=True, exist_ok=True)
    for name in [args.name] if args.name else names():
        module = importlib.import_module(f"bench.{name}")
        options = {"quick": args.quick}
        if "out" in inspect.signature(module.run).parameters:
            options["out"] = args.out
        begun = _harness.circumstances(args.quick)
        rows = module.run(**options)
        _harness.print_table(name, rows)
        if args.json:
            device = getattr(module, "device", _harness.device)()
            _harness.write_json(args.json, _harness.document(name, rows, begun, device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
