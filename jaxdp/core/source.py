"""Records that are not in memory: what a run asks of a file, or of whatever holds them."""

import abc
from typing import Any, ClassVar

import numpy as np


class Source(abc.ABC):
    """Base class of data that is read a few records at a time.

    Record i is the same numbers whenever it is asked for, and depends on no other record:
    one person is in one record, or the guarantee is not that person's. Where the plan's
    sampling amplifies privacy, which records are read is secret: whoever watches the reads
    of a store (its access log, its billing) knows the sample, and has no amplification.

    A source is read in another thread than the one that made it, by one call at a time.

    Example:
      >>> import numpy as np
      >>> import jaxdp
      >>> class Squares(jaxdp.data.Source):
      ...     def __len__(self):
      ...         return 100
      ...     def rows(self, indices):
      ...         return indices.astype(np.float32) ** 2
      ...     def digest(self):
      ...         return b"squares"
      ...     def check(self):
      ...         pass  # They never change.
      >>> Squares().rows(np.array([2, 3])).tolist()
      [4.0, 9.0]
    """

    #: Whether it is read once, from the first record to the last: for ``SinglePass`` alone.
    once: ClassVar[bool] = False

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of records."""

    @abc.abstractmethod
    def rows(self, indices: np.ndarray) -> Any:
        """Returns records as a pytree of NumPy arrays with leading axis B.

        Args:
          indices: int64 (B,), from 0 to ``len(self) - 1``, in any order, some more than
            once.

        Raises:
          ValueError: a record cannot be read.

        Example:
          >>> import numpy as np
          >>> import jaxdp
          >>> source = jaxdp.data.ArraySource(np.arange(6.0).reshape(3, 2))
          >>> source.rows(np.array([2, 0])).tolist()
          [[4.0, 5.0], [0.0, 1.0]]
        """

    @abc.abstractmethod
    def digest(self) -> bytes:
        """Returns a digest of all records and their order, in bounded memory.

        The record of a run (``ledger=``) keeps it under a secret key. Steps that were
        under way when a run was killed are computed again with their own noise only where
        it is the same: other records would put one noise over two sums.

        Example:
          >>> import numpy as np
          >>> import jaxdp
          >>> source = jaxdp.data.ArraySource(np.arange(6.0).reshape(3, 2))
          >>> again = jaxdp.data.ArraySource(np.arange(6.0).reshape(3, 2))
          >>> source.digest() == again.digest()
          True
        """

    @abc.abstractmethod
    def check(self) -> None:
        """Requires that no record has changed since the source was made.

        It is called after every fetch, so that it must be cheap: sizes and times of files.

        Raises:
          ValueError: something changed, named.

        Example:
          >>> import numpy as np
          >>> import jaxdp
          >>> source = jaxdp.data.ArraySource(np.arange(6.0).reshape(3, 2))
          >>> source.check()
        """

    def example(self) -> Any:
        """Returns a few records, which tell shapes and dtypes before keys are spent.

        By default the first and the last one, which are there if the length is true.

        Example:
          >>> import numpy as np
          >>> import jaxdp
          >>> source = jaxdp.data.ArraySource(np.arange(6.0).reshape(3, 2))
          >>> source.example().tolist()
          [[0.0, 1.0], [4.0, 5.0]]
        """
        return self.rows(np.asarray([0, len(self) - 1], np.int64))
