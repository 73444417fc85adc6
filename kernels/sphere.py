r"""Random directions over a pytree, regenerated instead of stored.

A direction :math:`u` has :math:`\mathbb E[uu^\top]=I_d`, with :math:`d` the number
of elements of all leaves together:

===============  =============================================  ==================
law              what it is                                     squared norm
===============  =============================================  ==================
``sphere``       uniform on the sphere of radius sqrt(d)        d
``gaussian``     standard normal                                chi-square, mean d
``rademacher``   independent signs, from packed bits            d
``orthonormal``  K orthogonal rows of radius sqrt(d), K <= d    d
``ball``         uniform in the ball of radius sqrt(d);         at most d
                 :math:`\mathbb E[uu^\top]=\frac d{d+2}I`
===============  =============================================  ==================

The bits of a leaf come from ``fold_in(key, hash of the leaf's path)``, so they do
not depend on the other leaves or on their order. A leaf *declared stacked* holds
layers along its first axis and folds in the layer index once more: a scan over
layers can then regenerate one layer's part alone (:func:`leaf_direction`).

A :class:`Direction` keeps as little as it can: the key (Gaussian), the key and one
scale (sphere, ball), one bit an element (Rademacher, drawn once and read three
times: both forwards and the update), everything for orthonormal rows and after
:func:`kept`.
"""

import dataclasses
import functools
import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxdp.kernels import threefry

LAWS = ("sphere", "gaussian", "rademacher", "orthonormal", "ball")
MAX_ORTHONORMAL = 64
#: Up to this many numbers, K directions are stored: see :func:`kept`.
KEPT = 2**22
#: Raised whenever the same key comes to give another direction: what a log of releases
#: must agree on with who replays it.
VERSION = 2

PathPredicate = Callable[[str], bool]


def path_str(path: tuple[Any, ...]) -> str:
    """Returns the name of a leaf: its keys joined by ``/``.

    Example:
      >>> import jax
      >>> from jaxdp.kernels import sphere
      >>> leaves = jax.tree_util.tree_leaves_with_path({"dense": {"kernel": 0.0}})
      >>> sphere.path_str(leaves[0][0])
      'dense/kernel'
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaf_id(path: str) -> int:
    """Hashes a leaf's path to 32 bits, the same on every machine.

    Example:
      >>> from jaxdp.kernels import sphere
      >>> sphere.leaf_id("dense/kernel") == sphere.leaf_id("dense/kernel") < 2**32
      True
    """
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "little")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("leaf_keys", "scale", "stored"),
    meta_fields=("law", "shapes", "stacked"),
)
@dataclasses.dataclass(frozen=True)
class Direction:
    """One direction over a tree, or K of them (leading axis K on every array).

    Attributes:
      leaf_keys: typed keys, one for each leaf of ``shapes``, and of stacked leaves one
        for each layer.
      scale: float32, shape=(): factor on the normals (sphere, ball; else 1).
      stored: ``"words"`` -> packed signs of all leaves, uint32, of which each leaf reads
        a slice (Rademacher), or path -> row, float32 (orthonormal, and what :func:`kept`
        stored); empty otherwise.
      law: name of the law; static.
      shapes: ``((path, shape), ...)`` of the leaves that move; static. A leaf that
        is absent is frozen.
      stacked: paths of the leaves whose first axis counts layers; static.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import sphere
      >>> params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
      >>> rows = sphere.directions(jax.random.key(0), params, law="gaussian", num=5)
      >>> rows.paths, rows.dim, rows.leaf_keys.shape
      (('b', 'w'), 8, (5, 2))
    """

    leaf_keys: jax.Array
    scale: jax.Array
    stored: dict[str, jax.Array]
    law: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    stacked: frozenset[str]

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the leaves that move."""
        return tuple(path for path, _ in self.shapes)

    @property
    def dim(self) -> int:
        """Number d of elements that move."""
        return sum(math.prod(shape) for _, shape in self.shapes)


def wide(*dtypes: Any) -> Any:
    """Returns float32, or the widest of the floating dtypes that are wider.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import sphere
      >>> sphere.wide(jnp.bfloat16), sphere.wide(jnp.float32, jnp.float64)
      (dtype('float32'), dtype('float64'))
    """
    known = (jnp.dtype(d) for d in dtypes)
    wider = any(d == jnp.float64 for d in known)  # Under strict promotion, too.
    return jnp.dtype(jnp.float64 if wider else jnp.float32)


def _moving_leaves(
    like: Any, trainable: PathPredicate | None
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    leaves = [
        (path_str(path), jnp.shape(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(like)
    ]
    leaves = [(p, s) for p, s in leaves if trainable is None or trainable(p)]
    seen: dict[int, str] = {}
    for path, _ in leaves:
        other = seen.setdefault(leaf_id(path), path)
        if other != path or sum(p == path for p, _ in leaves) > 1:
            raise ValueError(
                f"the leaves {other!r} and {path!r} hash to the same identity and "
                "would share random bits; rename one of them"
            )
    return tuple(leaves)


def leaf_keys(key: jax.Array, paths: Sequence[str]) -> jax.Array:
    """Returns ``fold_in(key, hash of the path)`` for each leaf.

    In a loop, which XLA does not fuse: the scalar chain would otherwise be compiled into
    every kernel that draws from it.

    Example:
      >>> import jax
      >>> from jaxdp.kernels import sphere
      >>> sphere.leaf_keys(jax.random.key(0), ["w", "b"]).shape
      (2,)
    """
    ids = np.array([leaf_id(path) for path in paths], np.uint32)
    return jax.lax.map(lambda i: threefry.fold_in(key, i), jnp.asarray(ids))


def _draw(
    draw: Callable[[jax.Array], jax.Array],
    direction: Direction,
    path: str,
    shape: tuple[int, ...],
    layer: int | jax.Array | None,
) -> jax.Array:
    """Calls ``draw`` with the key of a leaf, of one layer, or of all layers stacked."""
    begin = 0
    for name, whole in direction.shapes:
        num = whole[0] if name in direction.stacked else 1
        if name == path:
            break
        begin += num
    keys = direction.leaf_keys[begin : begin + num]
    if path not in direction.stacked:
        return draw(keys[0])
    if layer is not None:
        return draw(keys[layer])
    # Apart from those of other leaves, or a GPU draws two leaves in one kernel, and holds
    # what it computes for both.
    return jax.vmap(draw)(jax.lax.optimization_barrier(keys))


def _grid(shape: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    """Returns how the signs of a leaf lie in words: rows, rows of words, shape of a row.

    One word holds a column of 32 rows. Rows run over as many leading axes as give 32 of
    them, so that few bits are left over.
    """
    axes = next(
        (i for i in range(len(shape)) if math.prod(shape[:i]) >= 32), len(shape)
    )
    rows = math.prod(shape[:axes])
    return rows, -(-rows // 32), shape[axes:]


def _num_words(shape: tuple[int, ...]) -> int:
    """Returns how many words hold the signs of a leaf."""
    _, count, row = _grid(shape)
    return count * math.prod(row)


def _signs(words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Unpacks bits to +-1 in float32: of row r, bit 31 - r % 32 of row r // 32 of words."""
    rows, count, row = _grid(shape)
    # In the leaf's own axes: what reads along the last of them reads words one after the
    # other, which XLA can vectorise.
    words = words.reshape(count, 1, *row)
    shift = jnp.arange(32, dtype=jnp.uint32).reshape(1, 32, *[1] * len(row))
    sign = ((words << shift) & jnp.uint32(0x80000000)).reshape(count * 32, *row)[:rows]
    signs = jax.lax.bitcast_convert_type(sign | jnp.uint32(0x3F800000), jnp.float32)
    return signs.reshape(shape)


def _row_indices(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns flat indices of rows of a leaf: uint32 ``(*rows.shape, *shape[1:])``."""
    width = math.prod(shape[1:])
    within = jax.lax.broadcasted_iota(jnp.uint32, (*rows.shape, width), rows.ndim)
    index = rows.astype(jnp.uint32)[..., None] * jnp.uint32(width) + within
    return index.reshape(*rows.shape, *shape[1:])


def _signs_at(
    words: jax.Array, begin: int | jax.Array, index: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Returns elements of :func:`_signs` at flat indices; words begin at ``begin``."""
    width = np.uint32(math.prod(_grid(shape)[2]))
    row, column = index // width, index % width
    word = words[(row // 32) * width + column + begin]
    sign = (word << (row % 32)) & jnp.uint32(0x80000000)
    return jax.lax.bitcast_convert_type(sign | jnp.uint32(0x3F800000), jnp.float32)


def in_words(direction: Direction, path: str, x: jax.Array) -> jax.Array:
    """Returns ``x``, computed from a leaf's part of a direction; its bits stay the same.

    Where it comes from packed signs a TPU computes it with one axis more, along which each
    word is repeated. Else its compiler merges that axis first, and stores 32 bits for
    each sign.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import sphere
      >>> like = jnp.zeros((32, 2))
      >>> rows = sphere.directions(jax.random.key(0), like, law="rademacher")
      >>> part = sphere.leaf_direction(sphere.select(rows, 0), "", (32, 2))
      >>> bool((sphere.in_words(rows, "", part) == part).all())
      True
    """
    layers = int(path in direction.stacked)
    rows, count, row = _grid(x.shape[layers:])
    if direction.law != "rademacher" or rows % 32:
        return x
    shape = (*x.shape[:layers], count, 32, *row)

    def apart(x: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(x.reshape(shape)).reshape(x.shape)

    return jax.lax.platform_dependent(x, tpu=apart, default=lambda x: x)


def _part_shapes(direction: Direction) -> list[tuple[int, ...]]:
    """Returns the shapes of all leaves and layers, one after the other."""
    shapes = []
    for path, shape in direction.shapes:
        layered = path in direction.stacked
        shapes += [shape[1:]] * shape[0] if layered else [shape]
    return shapes


def _part_keys(
    key: jax.Array,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    stacked: frozenset[str],
) -> jax.Array:
    """Returns the keys of all leaves and layers, one after the other.

    All at once, and stored: a chain of its own for each leaf takes long to compile.
    """
    keys = leaf_keys(key, [path for path, _ in shapes])
    if not stacked:
        return keys
    leaves, layers = [], []
    for leaf, (path, shape) in enumerate(shapes):
        layers += range(shape[0]) if path in stacked else [-1]
        leaves += [leaf] * (shape[0] if path in stacked else 1)
    keys = keys[np.asarray(leaves, np.int32)]
    layer = np.asarray(layers, np.int32)
    folded = jax.vmap(threefry.fold_in)(keys, jnp.asarray(np.maximum(layer, 0)))
    return jax.lax.optimization_barrier(jnp.where(layer < 0, keys, folded))


def _place(direction: Direction, path: str) -> tuple[int, int]:
    """Returns where the words of a leaf begin, and how far apart its layers are."""
    begin = 0
    for name, shape in direction.shapes:
        layered = name in direction.stacked
        stride = -(-_num_words(shape[1:] if layered else shape) // threefry.BLOCK)
        stride *= threefry.BLOCK
        if name == path:
            return begin, stride
        begin += stride * (shape[0] if layered else 1)
    raise KeyError(path)


def _one(bare: Direction, key: jax.Array) -> Direction:
    """Fills in the stored words or the scale that the law keeps."""
    if bare.law == "rademacher" and not bare.dim:
        return dataclasses.replace(bare, stored={"words": jnp.zeros(0, jnp.uint32)})
    if bare.law not in ("rademacher", "sphere", "ball") or not bare.dim:
        return bare
    keys, shapes = bare.leaf_keys, _part_shapes(bare)
    if bare.law == "rademacher":
        words = threefry.stored_words(keys, [_num_words(shape) for shape in shapes])
        return dataclasses.replace(bare, stored={"words": words})
    squares = threefry.normal_sum_of_squares(keys, [math.prod(s) for s in shapes])
    norm = jnp.sqrt(jnp.maximum(squares, jnp.float32(1e-30)))
    scale = jnp.float32(math.sqrt(bare.dim)) / norm
    if bare.law == "ball":
        radius_key = threefry.fold_in(key, leaf_id("radius of the ball"))
        word = threefry.bits(radius_key, ()).astype(jnp.float32)
        unit = (word + jnp.float32(1)) * jnp.float32(2**-32)
        scale = scale * unit ** jnp.float32(1 / max(bare.dim, 1))
    # The normals of the norm are not the normals of the perturbation: see there.
    leaf_keys = threefry.keys_after(bare.leaf_keys, scale)
    return dataclasses.replace(bare, scale=scale, leaf_keys=leaf_keys)


def _orthonormal(rows: Direction) -> Direction:
    """Stores K orthogonal rows of radius sqrt(d): Haar, from K normal rows."""
    normals = jax.vmap(
        lambda one: jnp.concatenate(
            [leaf_direction(one, p, s).reshape(-1) for p, s in one.shapes]
        )
    )(dataclasses.replace(rows, law="gaussian"))
    flat = orthonormalised(normals) * jnp.float32(math.sqrt(rows.dim))
    stored, begin = {}, 0
    for path, shape in rows.shapes:
        end = begin + math.prod(shape)
        stored[path] = flat[:, begin:end].reshape(len(flat), *shape)
        begin = end
    return dataclasses.replace(rows, stored=stored)


def orthonormalised(rows: jax.Array) -> jax.Array:
    """Orthonormalises the rows of a matrix, as Gram and Schmidt do, from the first on.

    By Cholesky factors of their inner products, K x K, twice (CholeskyQR2: Fukaya et al.,
    2014): two products of matrices, where a QR of d x K is d K long chains. If K is not
    far below d, rows can be near dependent: three times before that, with what is added
    to the diagonal (Fukaya et al., 2020). The triangular factor of each has a positive
    diagonal, so that normal rows give a Haar frame.

    Args:
      rows: float32, shape=(K, d) with K <= d.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import sphere
      >>> rows = jax.random.normal(jax.random.key(0), (3, 5))
      >>> q = sphere.orthonormalised(rows)
      >>> bool(jnp.allclose(q @ q.T, jnp.eye(3), atol=1e-5))
      True
    """
    num, dim = rows.shape
    product = functools.partial(jnp.matmul, precision="highest")
    for shift in (0, 0) if dim >= 4 * num else (1e-5, 1e-5, 1e-5, 0, 0):
        gram = product(rows, rows.T)
        gram = gram + shift * jnp.trace(gram) * jnp.eye(num, dtype=rows.dtype)
        rows = product(_inverse_cholesky(gram), rows)
    return rows


def _inverse_cholesky(gram: jax.Array) -> jax.Array:
    """Computes the inverse of the lower Cholesky factor of a matrix, by elimination.

    On every device: cuSOLVER and LAPACK are not asked, for at most 64 rows.
    """
    num = len(gram)
    index = jnp.arange(num)

    def eliminate(k: int | jax.Array, both: jax.Array) -> jax.Array:
        pivot = both[k] / jnp.sqrt(both[k, k])
        below = jnp.where(index > k, pivot[:num], 0)  # Symmetric: a column, as the row.
        return (both - below[:, None] * pivot[None]).at[k].set(pivot)

    both = jnp.concatenate([gram, jnp.eye(num, dtype=gram.dtype)], axis=1)
    return jax.lax.fori_loop(0, num, eliminate, both)[:, num:]


def directions(
    key: jax.Array,
    like: Any,
    *,
    law: str,
    num: int = 1,
    trainable: PathPredicate | None = None,
    stacked: PathPredicate | None = None,
) -> Direction:
    """Draws ``num`` directions over the leaves of ``like``.

    Args:
      key: typed key of this step; public. Direction k uses ``fold_in(key, k)``.
      like: pytree of arrays or ``jax.ShapeDtypeStruct``; only shapes are read.
      law: one of :data:`LAWS`. Always drawn in float32, whatever the dtypes.
      num: K. Orthonormal rows need ``K <= min(d, 64)``.
      trainable: predicate on the path; the other leaves get no direction.
      stacked: predicate on the path: leaves whose first axis counts layers.

    Returns:
      A :class:`Direction` with leading axis K on every array.

    Raises:
      ValueError: unknown law, too many rows, two leaves with one identity.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import sphere
      >>> params = {"w": jnp.zeros((3, 2)), "frozen": jnp.zeros(2)}
      >>> rows = sphere.directions(
      ...     jax.random.key(0), params, law="sphere", num=4, trainable=lambda p: p == "w"
      ... )
      >>> rows.dim, rows.scale.shape
      (6, (4,))
    """
    if law not in LAWS:
        raise ValueError(f"law must be one of {', '.join(LAWS)}; got {law!r}")
    if num < 1:
        raise ValueError(f"num must be at least 1, got {num}")
    shapes = _moving_leaves(like, trainable)
    layered = frozenset(
        p for p, s in shapes if s and stacked is not None and stacked(p)
    )
    dim = sum(math.prod(shape) for _, shape in shapes)
    if law == "orthonormal" and not 1 <= num <= min(dim, MAX_ORTHONORMAL):
        raise ValueError(
            f"num must be at most min(d, {MAX_ORTHONORMAL}) = "
            f"{min(dim, MAX_ORTHONORMAL)} for orthonormal directions, got {num}"
        )

    def one(k: jax.Array) -> Direction:
        one_key = threefry.fold_in(key, k)
        keys = _part_keys(one_key, shapes, layered)
        bare = Direction(keys, jnp.float32(1), {}, law, shapes, layered)
        return _one(bare, one_key)

    rows = jax.vmap(one)(jnp.arange(num, dtype=jnp.uint32))
    return _orthonormal(rows) if law == "orthonormal" else rows


def kept(rows: Direction) -> Direction:
    """Returns the same K directions, drawn once and stored, if they are small enough.

    Both signs and the update then read them. Beyond :data:`KEPT` numbers they are drawn
    again for each, and need no memory; so are those of stacked layers. Signs are stored
    as bits anyway.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import sphere
      >>> rows = sphere.directions(jax.random.key(0), jnp.zeros(3), law="sphere", num=2)
      >>> sphere.kept(rows).stored[""].shape
      (2, 3)
    """
    num = rows.scale.shape[0]
    if rows.stored or rows.stacked or num * rows.dim > KEPT:
        return rows

    def one(row: Direction) -> dict[str, jax.Array]:
        return {path: leaf_direction(row, path, shape) for path, shape in rows.shapes}

    return dataclasses.replace(rows, stored=jax.vmap(one)(rows))


def select(rows: Direction, k: int) -> Direction:
    """Returns direction ``k`` (static) of K.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import sphere
      >>> rows = sphere.directions(jax.random.key(0), jnp.zeros(3), law="sphere", num=4)
      >>> sphere.select(rows, 2).scale.shape
      ()
    """
    return jax.tree.map(lambda a: a[k], rows)


def leaf_direction(
    direction: Direction,
    path: str,
    shape: tuple[int, ...],
    layer: int | jax.Array | None = None,
    rows: jax.Array | None = None,
) -> jax.Array:
    """Returns the part of one direction for a leaf, or for a layer or rows of it.

    Args:
      direction: one direction (no leading axis).
      path: a leaf of ``direction.shapes``.
      shape: of the leaf, or of the slice when ``layer`` is given.
      layer: index of the layer in a leaf that was declared stacked, shape=().
      rows: integers, any shape: indices into the first axis of a leaf that was not
        declared stacked. A table of which few rows are read costs those rows alone.

    Returns:
      float32, of that shape, or of ``rows.shape + shape[1:]``. Rounded to float32 before
      it is used where it comes out of floating-point arithmetic: XLA would contract that
      arithmetic differently in different programs, and a replay would be off by an ulp.
      Signs are exact.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import sphere
      >>> params = {"w": jnp.zeros((3, 2))}
      >>> rows = sphere.directions(jax.random.key(0), params, law="rademacher")
      >>> part = sphere.leaf_direction(sphere.select(rows, 0), "w", (3, 2))
      >>> part.shape, jnp.unique(jnp.abs(part)).tolist()
      ((3, 2), [1.0])
    """
    if layer is not None and path not in direction.stacked:
        raise ValueError(
            f"layer was given for the leaf {path!r}, which was not declared stacked; "
            "declare it with stacked="
        )
    whole = dict(direction.shapes)[path]
    if layer is None or isinstance(layer, Tracer):
        there = True
    else:
        there = 0 <= operator.index(layer) < whole[0]
    if not there:
        raise ValueError(
            f"layer must be one of the {whole[0]} of {path!r}, counted from 0, got {layer}"
        )
    if tuple(shape) != (whole if layer is None else whole[1:]):
        raise ValueError(
            f"shape must be that of the leaf {path!r}, {whole}, or of a layer that is "
            f"given, got {tuple(shape)}: another part of it would get another direction"
        )
    if rows is not None and path in direction.stacked:
        raise ValueError(
            f"rows was given for the leaf {path!r}, which was declared stacked; take them "
            "from a layer of it"
        )
    if rows is not None:  # From the end, as an array's.
        rows = jnp.where(rows < 0, rows + shape[0], rows)
    if direction.stored:
        return _stored(direction, path, shape, layer, rows)
    if rows is not None:
        index = _row_indices(rows, shape)
        normals = lambda key: threefry.normal_at(key, index)  # noqa: E731
    else:
        layers = path in direction.stacked and layer is None
        draw_shape = shape[1:] if layers else shape
        normals = lambda key: threefry.normal(key, draw_shape)  # noqa: E731
    z = _draw(normals, direction, path, shape, layer)
    if direction.law in ("sphere", "ball"):
        z = z * direction.scale
    return _finished(z, direction.leaf_keys)


def _finished(z: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns ``z`` rounded to float32 before it is used, alike in compiled programs.

    Compilers for GPUs and TPUs store what goes through a barrier, a whole leaf in float32.
    That for CPUs does not, and :func:`threefry.rounded` costs a few instructions.
    """
    zero = threefry.zero_after(jax.random.key_data(keys))
    return jax.lax.platform_dependent(
        z,
        zero,
        cpu=lambda z, _: jax.lax.optimization_barrier(z),
        default=threefry.rounded,
    )


def _stored(
    direction: Direction,
    path: str,
    shape: tuple[int, ...],
    layer: int | jax.Array | None,
    rows: jax.Array | None,
) -> jax.Array:
    """Returns :func:`leaf_direction` of the laws that store their bits or their rows."""
    if direction.law != "rademacher":
        stored = direction.stored[path]
        if layer is not None:
            return jax.lax.dynamic_index_in_dim(stored, layer, keepdims=False)
        return stored if rows is None else stored[rows]
    words = direction.stored["words"]
    begin, stride = _place(direction, path)
    if rows is not None:
        return _signs_at(words, begin, _row_indices(rows, shape), shape)
    if path not in direction.stacked or layer is not None:
        if layer is not None:  # No layer reads another leaf's signs.
            layer = jnp.clip(layer, 0, dict(direction.shapes)[path][0] - 1)
        at = begin if layer is None else begin + stride * layer
        count = _num_words(shape)
        return _signs(jax.lax.dynamic_slice_in_dim(words, at, count), shape)
    num, shape = shape[0], shape[1:]

    def of_slices(words: jax.Array) -> jax.Array:
        own = words[begin : begin + num * stride].reshape(num, stride)
        return jax.vmap(lambda one: _signs(one[: _num_words(shape)], shape))(own)

    def of_elements(words: jax.Array) -> jax.Array:
        index = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
        begins = begin + stride * jnp.arange(num, dtype=jnp.uint32)
        return jax.vmap(lambda at: _signs_at(words, at, index, shape))(begins)

    # A GPU's compiler stores slices that are long and often read: the words a second time.
    return jax.lax.platform_dependent(
        words, cuda=of_elements, rocm=of_elements, default=of_slices
    )


def materialise(direction: Direction, like: Any) -> Any:
    """Returns one direction as a tree like ``like``; frozen leaves are zero.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxdp.kernels import sphere
      >>> params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
      >>> rows = sphere.directions(jax.random.key(0), params, law="sphere")
      >>> tree = sphere.materialise(sphere.select(rows, 0), params)
      >>> round(float(sum(jnp.sum(leaf**2) for leaf in tree.values())), 3)  # d = 8.
      8.0
    """

    def leaf(path: tuple[Any, ...], x: Any) -> jax.Array:
        name = path_str(path)
        if name not in direction.paths:
            return jnp.zeros(x.shape, jnp.float32)
        return leaf_direction(direction, name, tuple(x.shape))

    return jax.tree_util.tree_map_with_path(leaf, like)


def flat(key: jax.Array, dim: int, *, law: str, num: int = 1) -> jax.Array:
    """Draws ``num`` directions in R^dim as rows, float32 ``(num, dim)``.

    Example:
      >>> import jax
      >>> from jaxdp.kernels import sphere
      >>> rows = sphere.flat(jax.random.key(0), 3, law="orthonormal", num=2)
      >>> bool(jax.numpy.allclose(rows @ rows.T, 3 * jax.numpy.eye(2), atol=1e-4))
      True
    """
    like = jax.ShapeDtypeStruct((dim,), jnp.float32)
    rows = directions(key, like, law=law, num=num)
    return jax.vmap(lambda one: materialise(one, like))(rows)
