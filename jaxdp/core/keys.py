"""Randomness: one type of key, three roots, one table of roles.

A :class:`Keys` holds three independent roots. The *direction* root is public: with it
and the releases anybody can rebuild a run. The *noise* and *sampling* roots are secret;
whoever has one can subtract the noise or undo the amplification.

Randomness is a function of (root, role, step): nothing is split and carried, so that
regenerating, replaying and resuming are the same thing. This module alone folds.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import secrets
import threading
from collections.abc import Iterator
from concurrent import futures
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.extend.core import get_opaque_trace_state

from jaxdp.core import validate
from jaxdp.kernels import threefry

#: Every use of a stream. A role says what is drawn, and is drawn from one root only: the
#: root of its name, or the one beside it.
ROLES = {
    "direction": 1,
    "noise": 2,
    "sampling": 3,
    "output": 4,  # direction root: which iterate is returned
    "position": 5,  # direction root: where on a segment is asked
    "vertices_x": 6,  # noise root: vertices of the minimising player's iterate
    "vertices_y": 7,  # noise root: of the maximising one's
    "source": 8,  # direction root: from which iterates an average is drawn
    "records": 9,  # noise root: synthetic ones, from a histogram that is public
    "refresh": 10,  # noise root: of gradients that begin a period
    "escape": 11,  # noise root: of products with Hessians, and of Hessians
    "order": 12,  # sampling root: in which records are read
    "values": 13,  # direction root: of synthetic records, once their shares are public
    "rounding": 14,  # direction root: up or down, of parameters of 16 bits
    "points": 15,  # direction root: in the ball of a certificate
    "counts": 16,  # noise root: of records within a clip, beside correlated noise
}

#: What one ``Keys`` from entropy serves: each of these once, in any order. Their draws are
#: of different roles or labels, so that none is shared.
#:
#: What belongs to one of them spends nothing. ``jaxdp.o2nc`` (after ``private_oracle`` or
#: any other gradient), ``sampling.batch`` and a plan's ``replay`` read the run's directions
#: and samples. ``tune``'s trials have keys of their own, hashed from the search's.
#: ``resume`` goes on with the run of its folder. ``broadcast`` hands the keys of one run to
#: its processes. ``synthetic_records`` draws from a histogram that is public.
USES = {
    "run": (
        "a run: one fit, one tune with all its trials, one metrics.private_choice or "
        "metrics.private_goldstein, or one init of a transformation or an algorithm, of "
        "whatever family"
    ),
    "private_gap": "a metrics.private_gap, before or after the run",
}

_ROOTS = ("direction", "noise", "sampling")
_SEED_WORDS = 8
_spent: set[bytes] = set()
_resuming: ContextVar[frozenset[bytes]] = ContextVar("resuming", default=frozenset())
_shapes_only: ContextVar[bool] = ContextVar("shapes_only", default=False)
_together: ContextVar[bool] = ContextVar("together", default=False)
_lock = threading.Lock()


def _untraced() -> Any:
    """Returns the trace state of JAX outside every transformation, read in a new thread."""
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(get_opaque_trace_state).result()


_UNTRACED = _untraced()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("direction", "noise", "sampling", "noise_words"),
    meta_fields=("private", "process", "shared"),
)
@dataclasses.dataclass(frozen=True, repr=False)
class Keys:
    """All the randomness of one run. Make it with ``from_entropy`` or ``insecure``.

    Attributes:
      direction: typed key, shape=(); public, of 64 bits.
      noise: typed key, shape=(); secret, of 128 bits; root of what is drawn on the device.
      sampling: typed key, shape=(); secret, of 128 bits.
      noise_words: uint32 (8,); secret; 256-bit root of what is drawn on the host.
      private: whether the roots come from the operating system's entropy; static. A run
        with ``insecure`` keys is reproducible and carries no privacy guarantee.
      process: id of the process that made private ones, 0 for insecure ones; static. What
        was spent is remembered by process, so no other one, such as a fork, may use them.
      shared: whether other processes of ``jax.distributed`` have them too; static. Private
        ones then begin no run but one of all these processes.

    Example:
      >>> import jaxdp
      >>> keys = jaxdp.Keys.from_entropy()
      >>> keys.private
      True
      >>> jaxdp.Keys.insecure(0)
      Keys(seed_source='insecure', private=False)
    """

    direction: jax.Array
    noise: jax.Array
    sampling: jax.Array
    noise_words: jax.Array
    private: bool
    process: int | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        if self.process is None:  # Else rebuilt, as jax.tree.map does.
            object.__setattr__(self, "process", os.getpid() if self.private else 0)

    @classmethod
    def from_entropy(cls) -> "Keys":
        """Draws new roots from 32 bytes of the operating system's entropy.

        One such object serves one run, and what :data:`USES` lists beside it: a second
        run of whatever family raises. It is neither copied nor pickled.

        Example:
          >>> import jaxdp
          >>> jaxdp.Keys.from_entropy()
          Keys(seed_source='entropy', private=True)
        """
        if isinstance(jnp.zeros(()), Tracer):
            raise ValueError(
                "keys must be made outside jit: entropy drawn while tracing would be a "
                "constant of the program, the same in every call"
            )
        return cls._from_seed(secrets.token_bytes(32), private=True)

    @classmethod
    def _from_seed(cls, seed: bytes, *, private: bool) -> "Keys":
        """Derives the roots from 32 secret bytes by hashing: none of them tells another."""

        def root(name: str, size: int) -> np.ndarray:
            digest = hashlib.shake_256(b"jaxdp keys 1 " + name.encode() + b":" + seed)
            return _words_of(digest.digest(size))

        direction = from_words(root("direction", 8))
        noise, sampling = (from_words(root(n, 16)) for n in ("noise", "sampling"))
        exact = jnp.asarray(root("exact noise", 32))
        return cls(direction, noise, sampling, exact, private=private)

    @classmethod
    def insecure(cls, seed: int | jax.Array) -> "Keys":
        """Makes reproducible roots from a seed; for tests, studies and benchmarks.

        Args:
          seed: Python integer in [0, 2**256), or an integer array, shape=(), which may be
            traced (then it counts modulo 2**32): ``jax.vmap(Keys.insecure)(jnp.arange(n))``
            gives the same roots.

        Raises:
          TypeError: not an integer. ValueError: out of range.

        Example:
          >>> import jaxdp
          >>> one, same = jaxdp.Keys.insecure(7), jaxdp.Keys.insecure(7)
          >>> one.private, bool((one.noise_words == same.noise_words).all())
          (False, True)
        """
        words = _seed_words(seed)
        base = _wrap(words[:2])
        for i in range(2, _SEED_WORDS):
            base = threefry.fold_in(base, words[i])

        def root(number: int) -> jax.Array:
            return threefry.fold_in(base, number)

        def wide(parent: jax.Array, size: int) -> jax.Array:
            keys = [threefry.fold_in(parent, i) for i in range(size // 2)]
            return jnp.concatenate([jax.random.key_data(key) for key in keys])

        noise, sampling = (from_words(wide(root(i), 4)) for i in (2, 3))
        return cls(root(1), noise, sampling, wide(root(4), 8), private=False)

    def broadcast(self) -> "Keys":
        """Returns the keys of process 0 in every process of ``jax.distributed``.

        All processes call it, and wait for one another: ``Keys.from_entropy().broadcast()``
        gives a run of several processes its one set of roots. Such keys serve that run
        alone: each process by itself would put the same noise on data of its own. Secrets
        pass between the processes, as clear as everything else that they send to one
        another.

        Example:
          >>> import jaxdp
          >>> jaxdp.Keys.from_entropy().broadcast()  # here of a single process
          Keys(seed_source='entropy', private=True)
        """
        _check_process(self)
        parts = [jax.random.key_data(getattr(self, name)) for name in _ROOTS]
        flags = np.array([self.private], np.uint32)
        words = np.concatenate([*parts, self.noise_words, flags])
        *roots, exact, private = np.split(
            np.asarray(multihost_utils.broadcast_one_to_all(words)), (2, 6, 10, 18)
        )
        direction, noise, sampling = (from_words(root) for root in roots)
        flags = bool(private[0]), None, jax.process_count() > 1
        return Keys(direction, noise, sampling, jnp.asarray(exact), *flags)

    @property
    def seed_source(self) -> str:
        return "entropy" if self.private else "insecure"

    def __repr__(self) -> str:
        return f"Keys(seed_source={self.seed_source!r}, private={self.private})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Supports copy and pickle of insecure keys alone."""
        if self.private:
            raise TypeError(
                "keys from entropy cannot be copied or pickled, nor what holds them: a "
                "copy elsewhere would not know that they are spent, and would put the same "
                "noise on other data. Make keys where the run is; processes of one "
                "jax.distributed run share them by jaxdp.Keys.from_entropy().broadcast()"
            )
        return super().__reduce_ex__(protocol)


def _wrap(words: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _seed_words(seed: int | jax.Array) -> jax.Array:
    if isinstance(seed, (bool, np.bool_)):
        raise TypeError(f"seed must be an integer, got {seed!r}")
    if isinstance(seed, (int, np.integer)):
        if not 0 <= int(seed) < 2**256:
            raise ValueError(f"seed must be an integer in [0, 2**256), got {seed!r}")
        parts = [(int(seed) >> (32 * i)) & 0xFFFFFFFF for i in range(_SEED_WORDS)]
        return jnp.asarray(np.array(parts, np.uint32))
    if not isinstance(seed, (jax.Array, np.ndarray)) or not jnp.issubdtype(
        seed.dtype, jnp.integer
    ):
        raise TypeError(
            "seed must be an integer or an integer array of shape (), got "
            f"{validate.shown(seed)} of type {type(seed).__name__}"
        )
    if seed.shape != ():
        raise ValueError(
            f"seed must have shape (), got {seed.shape}; use jax.vmap for several"
        )
    if not isinstance(seed, Tracer):
        return _seed_words(int(seed))
    low = jnp.asarray(seed).astype(jnp.uint32)
    return jnp.zeros((_SEED_WORDS,), jnp.uint32).at[0].set(low)


def renewed(keys: Keys, attempt: int, salt: bytes = b"") -> Keys:
    """Returns the keys of a further attempt at steps whose releases were lost.

    Noise and sampling roots are new, hashed from the secret root, ``attempt`` and ``salt``;
    the directions stay. Attempt 0 is the keys themselves.
    """
    if attempt == 0:
        return keys
    new = _hashed(keys, b"jaxdp attempt %d:" % attempt, salt)
    return dataclasses.replace(new, direction=keys.direction)


def _hashed(keys: Keys, label: bytes, salt: bytes = b"") -> Keys:
    """Returns keys whose roots are hashed from the secret root of others."""
    seed = hashlib.shake_256(label + exact_noise_secret(keys) + salt).digest(32)
    return Keys._from_seed(seed, private=keys.private)


def to_hex(keys: Keys) -> dict[str, Any]:
    """Returns the roots as text, for a file that only its owner may read."""
    words = {name: jax.random.key_data(getattr(keys, name)) for name in _ROOTS}
    words["noise_words"] = keys.noise_words
    text = {k: np.asarray(x).astype("<u4").tobytes().hex() for k, x in words.items()}
    return text | {"private": keys.private}


def from_hex(fields: dict[str, Any]) -> Keys:
    """Reads what :func:`to_hex` wrote."""
    direction, noise, sampling = (root_from_hex(fields[name]) for name in _ROOTS)
    exact = jnp.asarray(_words_of(bytes.fromhex(fields["noise_words"])))
    return Keys(direction, noise, sampling, exact, bool(fields["private"]))


def root_from_hex(text: str) -> jax.Array:
    """Reads a root from its part of :func:`to_hex`."""
    return from_words(_words_of(bytes.fromhex(text)))


def from_words(words: Any) -> jax.Array:
    """Makes typed keys from their words, as ``jax.random.key_data`` gives them.

    Two words (..., 2) are a public key, four (..., 4) or more a secret one.
    """
    if np.shape(words)[-1] != 2:
        return threefry.secret_key(words)
    return _wrap(jnp.asarray(words))


def _words_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)


def check(keys: Any) -> Keys:
    """Returns ``keys`` if it is a :class:`Keys`, no JAX key or seed; else TypeError."""
    if isinstance(keys, Keys):
        return keys
    raise TypeError(
        f"keys must be a jaxdp.Keys, got {type(keys).__name__}; make one with "
        "jaxdp.Keys.from_entropy(), or jaxdp.Keys.insecure(seed) for a reproducible "
        "run without a privacy guarantee"
    )


def stream(
    root: jax.Array, role: str, step: int | jax.Array | None = None, context: int = 0
) -> jax.Array:
    """Returns the key of one role, or of one step of it.

    Args:
      root: the root of that role's name, shape=().
      role: an entry of :data:`ROLES`.
      step: index of the step; None gives the role's own key, for :func:`at_step`.
      context: 32 bits that separate runs of different plans (their digests).
    """
    derive = threefry.for_role if threefry.is_secret(root) else threefry.fold_in
    key = threefry.fold_in(derive(root, ROLES[role]), context)
    return key if step is None else at_step(key, step)


def at_step(role_key: jax.Array, step: int | jax.Array) -> jax.Array:
    """Returns the key of step ``step`` from a role's key: ``stream`` in two halves."""
    return threefry.fold_in(role_key, step)


def exact_noise_secret(keys: Keys) -> bytes:
    """Returns the 256-bit root of the exact host samplers; ValueError if it is traced."""
    if isinstance(keys.noise_words, Tracer):
        raise ValueError(
            "keys are traced, but Laplace noise is drawn on the host when the transform "
            'is built; build it outside jit and vmap, or give the plan noise="discrete"'
        )
    return np.asarray(keys.noise_words).astype("<u4").tobytes()


def trial(keys: Keys, index: int) -> Keys:
    """Returns the keys of one run of many, independent of the parent's and of one another.

    All roots, the public one too, are hashed from the parent's 256-bit secret: a trial's
    direction root, which may be published, tells neither a secret nor which trial it was.

    They are made outside jit, and reproducible if the parent's are; ``index`` is >= 0.
    """
    made = _hashed(keys, b"jaxdp keys 1 trial:" + index.to_bytes(8, "little"))
    return dataclasses.replace(made, process=keys.process)  # A fork's are no new ones.


def fingerprint(keys: Keys) -> bytes:
    """Returns 32 bytes by which processes of one run compare their keys. Secret."""
    return hashlib.sha256(repr(sorted(to_hex(keys).items())).encode()).digest()


def sampling_mark(keys: Keys) -> np.uint32:
    """Hashes the sampling root of private keys to 32 bits; 0 if they cannot be seen.

    That is where they are traced. Insecure keys have 0, too.
    """
    if not keys.private or isinstance(keys.sampling, Tracer):
        return np.uint32(0)
    with jax.ensure_compile_time_eval():
        root = np.asarray(jax.random.key_data(keys.sampling)).tobytes()
    digest = hashlib.sha256(b"jaxdp sampling mark:" + root).digest()
    return np.uint32(int.from_bytes(digest[:4], "little") | 1)


def _marks(keys: Keys, use: str) -> frozenset[bytes]:
    """Returns the marks of a use: a hash of each secret root, whatever object holds it."""
    use = use if use in USES else "run"
    return frozenset(
        hashlib.sha256(f"{use}:{name}:{text}".encode()).digest()
        for name, text in to_hex(keys).items()
        if name not in ("direction", "private")
    )


def _check_process(keys: Keys) -> None:
    if keys.private and keys.process != os.getpid():
        raise ValueError(
            "keys must be of this process, got keys from entropy that another one made "
            f"(process {keys.process}, before a fork), which may use them too: the same "
            "noise would cover two releases. Make them with jaxdp.Keys.from_entropy() in "
            "the process that runs"
        )


def check_unspent(keys: Keys, use: str, given: Any = None) -> None:
    """Raises unless keys from entropy can still be spent; does not mark them."""
    if not keys.private:
        return
    _check_process(keys)
    if _is_traced((keys, given)):
        raise ValueError(
            "keys from entropy must begin a run outside every transformation of JAX, got "
            "one that is traced, as by jax.jit(tx.init), jax.vmap or jax.eval_shape: "
            "what is compiled would begin a run with the same noise in every call. Call "
            "tx.init(params) as it is (its state lies where the params lie, or "
            "jax.device_put moves it); for shapes alone, give it jax.ShapeDtypeStruct "
            "leaves, which spend nothing"
        )
    again = _marks(keys, use) & _spent
    if not again <= _resuming.get():
        raise ValueError(
            f"keys have already served {USES.get(use, USES['run'])}; the same noise must "
            "not cover two releases, so make new ones with jaxdp.Keys.from_entropy()"
        )


def spend(keys: Keys, use: str, given: Any = None) -> None:
    """Marks keys from entropy as used.

    Args:
      keys: insecure ones are never spent.
      use: an entry of :data:`USES`; any other name is a run's.
      given: what the use begins from, such as params: looked through for tracers.

    Raises:
      ValueError: they have been used so: the same noise would cover two runs. Or this is
        traced, so that what is compiled could be called again and again. Or another
        process made them. Or other processes have them too, and ``given`` is not theirs.
    """
    # Not by what is given: a constant of the trace can be made a number again.
    if not keys.private or (_shapes_only.get() and isinstance(jnp.zeros(()), Tracer)):
        return
    _check_process(keys)  # Before the lock: a thread may have held it at the fork.
    if keys.shared and not (_together.get() or _spans_processes(given)):
        raise ValueError(
            "keys that were broadcast must serve a run of all processes: fit with a mesh "
            "of all their devices, or an init of params on one; each process by itself "
            "would put the same noise on other data. Keys of one process come from "
            "jaxdp.Keys.from_entropy()"
        )
    with _lock:
        check_unspent(keys, use, given)
        _spent.update(_marks(keys, use))
        # A run that goes on begins once: what users give may run in there, too.
        _resuming.set(_resuming.get() - _marks(keys, use))


def _spans_processes(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree)
    return any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in leaves)


def is_closed_over(root: jax.Array) -> bool:
    """Returns True for a root that a traced function has not got as an argument."""
    return _is_traced(()) and not isinstance(root, Tracer)


def check_given(keys: Keys, root: jax.Array) -> None:
    """Refuses a root of keys from entropy that a traced function closes over."""
    if keys.private and is_closed_over(root):
        raise ValueError(
            "keys must be an argument of the function that is traced, got keys from "
            "entropy that it closes over: their secret root would be a constant of the "
            "program, which compilation caches and dumps keep in files. Give them to the "
            "function, step(keys, params, state, ...), or draw outside of it. Under "
            "jax.vmap with unmapped keys: jax.jit(jax.vmap(...))"
        )


def _is_traced(tree: Any) -> bool:
    """Returns True within a transformation of JAX, or if ``tree`` holds a tracer."""
    if get_opaque_trace_state() != _UNTRACED:
        return True
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


@contextlib.contextmanager
def _within(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def shapes_only() -> contextlib.AbstractContextManager[None]:
    """Marks a block in which the library traces an ``init`` for its shapes alone."""
    return _within(_shapes_only, True)


def together(several: bool) -> contextlib.AbstractContextManager[None]:
    """Marks a block in which a run begins, of all processes if ``several``."""
    return _within(_together, several)


def resuming(keys: Keys) -> contextlib.AbstractContextManager[None]:
    """Allows the keys of a recorded run to be used again, for the same releases."""
    return _within(_resuming, _marks(keys, "run") if keys.private else frozenset())


def words(key: jax.Array, size: int) -> jax.Array:
    """Draws uniform uint32 words (size,) from a stream's key."""
    if threefry.is_secret(key):
        return threefry.bits(key, (size,))
    return threefry.stored_bits(key, size)


def uniforms(keys: Keys, shape: tuple[int, ...], index: int = 0) -> np.ndarray:
    """Draws numbers in [0, 1) for synthetic records, from the root that may be published.

    Args:
      keys: of the run; not spent.
      shape: of the numbers.
      index: of the draw; each has other numbers.

    Returns:
      float64 on the host, multiples of 2**-52.
    """
    key = stream(keys.direction, "values", index)
    drawn = np.asarray(words(key, 2 * math.prod(shape)), np.uint64)
    high, low = drawn.reshape(2, *shape)
    return ((high >> 6) * 2.0**26 + (low >> 6)) * 2.0**-52
