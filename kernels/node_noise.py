"""The random numbers behind prefix-sum noise: one tree of them for each step.

A period has one secret key. What its step t draws is a function of that key, t and the
leaf's path alone, so that a kernel may draw it again instead of storing it, and a leaf's
noise does not depend on the other leaves.

A kernel that only adds and subtracts draws integers (:func:`draw`). One that multiplies
draws on the grid of its products, ``2**-32`` (:func:`fine`), the same law on a
finer lattice.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.kernels import fixed_point, lattice_gaussian, sphere, threefry

#: Index of a step in its period, int32, shape=(); may be traced.
Step = int | jax.Array
#: Steps and twice a step must fit into int32.
MAX_PERIOD = 2**30
#: Leaves of at most so many elements are drawn together, those of similar sizes.
_TOGETHER = 2**12
#: So many sections of one shape are drawn each by itself. More are drawn in a loop, which
#: stores their noise, for the program would be long.
_WRITTEN_OUT = 8


def check_period(period: int, name: str = "period") -> None:
    """Raises unless ``period`` is an integer from 1 to :data:`MAX_PERIOD`.

    Example:
      >>> from jaxdp.kernels import node_noise
      >>> node_noise.check_period(100)
      >>> node_noise.check_period(0)
      Traceback (most recent call last):
          ...
      ValueError: period must be from 1 to 2**30, got 0
    """
    if not isinstance(period, int) or isinstance(period, bool):
        raise TypeError(f"{name} must be an integer, got {period!r}")
    if not 1 <= period <= MAX_PERIOD:
        raise ValueError(f"{name} must be from 1 to 2**30, got {period}")


def zeros(like: Any, rows: int | None = None) -> Any:
    """Returns a tree of int32 zeros like ``like``, or ``rows`` of them in each leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import node_noise
      >>> node_noise.zeros({"w": jnp.ones(3)}, rows=2)["w"].shape
      (2, 3)
    """
    front = () if rows is None else (rows,)
    return jax.tree.map(lambda x: jnp.zeros((*front, *x.shape), jnp.int32), like)


def fine_zeros(like: Any, rows: int | None = None) -> Any:
    """Returns :func:`zeros` with fractions, as ``fixed_point.Fixed``.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import node_noise
      >>> rows = node_noise.fine_zeros({"w": jnp.ones(3)}, rows=2)["w"]
      >>> rows.high.shape, rows.low.shape
      ((2, 3), (2, 3))
    """
    return jax.tree.map(fixed_point.from_int, zeros(like, rows))


def as_step(step: Step) -> jax.Array:
    """Returns ``step`` as an int32 scalar, traced or not.

    Example:
      >>> from jaxdp.kernels import node_noise
      >>> node_noise.as_step(3).dtype
      dtype('int32')
    """
    step = jnp.asarray(step)
    if step.shape or not jnp.issubdtype(step.dtype, jnp.integer):
        raise ValueError(
            f"step must be one integer, got shape {step.shape}, dtype {step.dtype}"
        )
    return step.astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Section:
    """Elements of one vector, in a shape: of the noise of the whole vector these are drawn.

    Trees of sections take the place of arrays in ``like``.

    Attributes:
      shape: of the elements; with several ranges it has one axis.
      ranges: where they lie in the vector, one after the other: (begin, end) pairs.
      label: many sections of one shape with equal labels are drawn in a loop.

    Raises:
      ValueError: a vector of so many elements that two would share their noise.

    Example:
      >>> from jaxdp.kernels import node_noise
      >>> node_noise.Section((2, 2), ((5, 9),)).index().tolist()
      [[5, 6], [7, 8]]
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    label: Hashable = None

    def __post_init__(self) -> None:
        if self.ranges and self.ranges[-1][1] >= 2**32:
            raise ValueError(
                f"an array of {self.ranges[-1][1]} elements exceeds the 2**32 counters"
            )

    def index(self) -> jax.Array:
        """Returns the place of each element in the vector, uint32.

        Example:
          >>> from jaxdp.kernels import node_noise
          >>> node_noise.Section((3,), ((0, 1), (6, 8))).index().tolist()
          [0, 6, 7]
        """
        if len(self.ranges) == 1:
            ((begin, _),) = self.ranges
            counters = threefry._counters(self.shape)
            return counters + np.uint32(begin) if begin else counters
        each = [
            threefry._counters((end - at,)) + np.uint32(at) for at, end in self.ranges
        ]
        return jnp.concatenate([jnp.zeros(0, jnp.uint32), *each])


def sections_of(size: Any) -> Any:
    """Returns the section that is all of a vector of a size; sections as they are.

    Example:
      >>> from jaxdp.kernels import node_noise
      >>> node_noise.sections_of(3).index().tolist()
      [0, 1, 2]
    """
    if isinstance(size, int | np.integer):
        return Section((int(size),), ((0, int(size)),))
    return size


def draw(key: jax.Array, step: jax.Array, like: Any, law: lattice_gaussian.Law) -> Any:
    """Draws the integers of one step of a period.

    Args:
      key: typed threefry key of this period, shape=(); secret.
      step: int32, shape=().
      like: pytree of arrays or ``jax.ShapeDtypeStruct``, of which only paths and shapes
        are read; or of :class:`Section`.
      law: of every integer.

    Returns:
      A tree like ``like``, int32: ``lattice_gaussian.draw`` under the leaf's key, which is
      ``fold_in(fold_in(key, step), hash of the leaf's path)``; of a bare array, and of all
      sections, it is ``fold_in(key, step)``.

    Raises:
      ValueError: two leaves have one identity and would share their noise.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> from jaxdp.kernels import lattice_gaussian, node_noise, threefry
      >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
      >>> law, like = lattice_gaussian.law(1000), {"w": jnp.zeros(3)}
      >>> noise = node_noise.draw(key, node_noise.as_step(0), like, law)
      >>> noise["w"].shape, noise["w"].dtype
      ((3,), dtype('int32'))
    """
    return _each(lattice_gaussian.draw_at, key, step, like, law)


def fine(key: jax.Array, step: jax.Array, like: Any, law: lattice_gaussian.Law) -> Any:
    """Draws the numbers of one step of a period, on the grid of ``2**-32``.

    As :func:`draw`, but of :class:`jaxdp.kernels.fixed_point.Fixed`, with
    ``lattice_gaussian.draw_fine`` and a law of ``lattice_gaussian.law(std, fine=True)``.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> from jaxdp.kernels import lattice_gaussian, node_noise, threefry
      >>> key = threefry.secret_key(np.arange(4, dtype=np.uint32))  # Not a secret.
      >>> law, like = lattice_gaussian.law(1000, fine=True), {"w": jnp.zeros(3)}
      >>> noise = node_noise.fine(key, node_noise.as_step(0), like, law)["w"]
      >>> noise.high.shape, noise.low.dtype
      ((3,), dtype('uint32'))
    """

    def number(*args: Any) -> fixed_point.Fixed:
        return fixed_point.Fixed(*lattice_gaussian.draw_fine_at(*args))

    return _each(number, key, step, like, law)


def _each(
    draw_at: Callable[[jax.Array, jax.Array, lattice_gaussian.Law], Any],
    key: jax.Array,
    step: jax.Array,
    like: Any,
    law: lattice_gaussian.Law,
) -> Any:
    """Returns the tree of what ``draw_at`` gives for each leaf's key and elements."""
    if any(isinstance(leaf, Section) for leaf in jax.tree.leaves(like)):
        return _of_sections(draw_at, threefry.fold_in(key, step), like, law)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    paths = [sphere.path_str(path) for path, _ in leaves]
    ids = [sphere.leaf_id(path) for path in paths]
    if len(set(ids)) < len(ids):
        raise ValueError(
            f"two of the leaves {', '.join(paths)} hash to the same identity and would "
            "share their noise; rename one of them"
        )
    if not leaves:
        return like
    step_key = threefry.fold_in(key, step)
    if paths == [""]:
        # An array by itself has no name. And its key costs no evaluation of the cipher in
        # the program, which XLA would repeat for every number.
        keys = step_key[None]
    else:  # In a loop, which XLA does not fuse: see sphere.
        keys = sphere.leaf_keys(step_key, paths)
    shapes = [tuple(leaf.shape) for _, leaf in leaves]
    drawn = {}
    for members in _groups(list(map(math.prod, shapes))):
        if len(members) == 1:
            (i,) = members
            drawn[i] = draw_at(keys[i], threefry._counters(shapes[i]), law)
            continue
        # One program for all of them. A longer array begins with a shorter one's numbers.
        longest = max(math.prod(shapes[i]) for i in members)

        def one(key: jax.Array, size: int = longest) -> Any:
            return draw_at(key, threefry._counters((size,)), law)

        # XLA would otherwise write the cipher into the consumers of each.
        rows = jax.lax.optimization_barrier(jax.vmap(one)(keys[np.array(members)]))
        for row, i in enumerate(members):
            drawn[i] = jax.tree.map(functools.partial(_part, row, shapes[i]), rows)
    return treedef.unflatten(drawn[i] for i in range(len(shapes)))


def _of_sections(
    draw_at: Callable[[jax.Array, jax.Array, lattice_gaussian.Law], Any],
    key: jax.Array,
    like: Any,
    law: lattice_gaussian.Law,
) -> Any:
    """Returns the tree of what ``draw_at`` gives for the elements of each section."""
    sections, treedef = jax.tree.flatten(like)
    alike: dict[tuple[tuple[int, ...], Hashable, Any], list[int]] = {}
    for i, section in enumerate(sections):
        own = i if len(section.ranges) > 1 else None
        alike.setdefault((section.shape, section.label, own), []).append(i)
    drawn: dict[int, Any] = {}
    for (shape, _, _), members in alike.items():
        if len(members) <= _WRITTEN_OUT:
            drawn |= {i: draw_at(key, sections[i].index(), law) for i in members}
            continue
        begins = np.array([sections[i].ranges[0][0] for i in members], np.uint32)
        index = threefry._counters(shape)
        one = functools.partial(_from, draw_at, key, index, law)
        rows = jax.lax.map(one, jnp.asarray(begins))
        for row, i in enumerate(members):
            drawn[i] = jax.tree.map(lambda each, row=row: each[row], rows)
    return treedef.unflatten(drawn[i] for i in range(len(sections)))


def _from(
    draw_at: Callable[[jax.Array, jax.Array, lattice_gaussian.Law], Any],
    key: jax.Array,
    index: jax.Array,
    law: lattice_gaussian.Law,
    begin: jax.Array,
) -> Any:
    """Draws the elements at ``begin`` and behind it."""
    return draw_at(key, index + begin, law)


def _groups(sizes: list[int]) -> list[list[int]]:
    """Splits leaves into those that are drawn together: of little size, and alike in it."""
    groups: dict[int, list[int]] = {}
    for i, size in enumerate(sizes):
        alike = max(size, 64).bit_length() if size <= _TOGETHER else -1 - i
        groups.setdefault(alike, []).append(i)
    return list(groups.values())


def _part(row: int, shape: tuple[int, ...], rows: jax.Array) -> jax.Array:
    """Returns the first numbers of a row, in a shape."""
    return rows[row, : math.prod(shape)].reshape(shape)
