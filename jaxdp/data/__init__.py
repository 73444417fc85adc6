"""Data sets, files of users, bins and groups, and sources of what is not in memory."""

from jaxdp.core import names as _names
from jaxdp.core.array_source import ArraySource as ArraySource
from jaxdp.core.source import Source as Source
from jaxdp.data.sources import ItemSource as ItemSource
from jaxdp.data.sources import IteratorSource as IteratorSource
from jaxdp.data.sources import ParquetSource as ParquetSource
from jaxdp.data.sources import concatenated as concatenated


def __dir__() -> list[str]:
    """Lists the public names."""
    return _names.offered(globals())
