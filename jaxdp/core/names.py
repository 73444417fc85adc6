"""Names that a package offers, for ``dir`` and the completion of editors."""

from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any


def offered(namespace: Mapping[str, Any], modules: Collection[str] = ()) -> list[str]:
    """Lists the public names of a package that are no modules, but for those given.

    Args:
      namespace: the package's ``globals()``; names that begin with an underscore are its
        own.
      modules: names of the modules that it offers.
    """
    found = {
        name
        for name, value in namespace.items()
        if not (name.startswith("_") or isinstance(value, ModuleType))
    }
    return sorted(found | set(modules))
