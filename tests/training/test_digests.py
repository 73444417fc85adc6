"""Digests: what they tell apart, without a second copy and without leaving the device."""

import hashlib
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.training import digests

TREE = {
    "a": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "b": {"c": np.arange(5) > 2, "d": np.float16(3), "e": np.zeros((0, 3), np.float32)},
    "f": np.array([1 + 2j, 3j], np.complex64),
    "g": np.arange(-3, 3, dtype=np.int8),
}
#: Of fewer bits than a byte.
SMALL = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")


def test_sha256_is_that_of_the_ledgers_of_before() -> None:
    want = hashlib.sha256()
    for path, x in (
        *(("a", TREE["a"]), ("b/c", TREE["b"]["c"]), ("b/d", TREE["b"]["d"])),
        *(("b/e", TREE["b"]["e"]), ("f", TREE["f"]), ("g", TREE["g"])),
    ):
        want.update(f"{path}:{x.dtype}:{x.shape};".encode() + x.tobytes())
    assert digests.sha256(TREE).digest() == want.digest()
    half = jnp.arange(6.0).astype(jnp.bfloat16)
    want = hashlib.sha256(b"w:bfloat16:(6,);" + np.asarray(half).tobytes())
    assert digests.sha256({"w": half}).digest() == want.digest()


def test_sha256_reads_arrays_where_they_lie() -> None:
    x = jax.block_until_ready(jnp.ones(2**22))
    digests.sha256(x)
    tracemalloc.start()
    try:
        digests.sha256(x)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < x.nbytes / 4


def test_a_checksum_tells_bits_places_and_leaves_apart() -> None:
    def of(tree: Any) -> bytes:
        return np.asarray(digests.checksum(jax.tree.map(jnp.asarray, tree))).tobytes()

    def changed(at: Any, value: Any) -> Any:
        a = TREE["a"].copy()
        a[at] = value
        return TREE | {"a": a}

    a = TREE["a"]
    nested = {"c": ~TREE["b"]["c"], "d": TREE["b"]["d"], "e": TREE["b"]["e"]}
    others = [
        TREE,
        changed((0, 0, 0), -0.0),
        changed((1, 2, 3), np.nextafter(np.float32(23), np.float32(24))),
        changed(0, a[0][::-1]),
        changed(0, a[0][:, [1, 0, 2, 3]]),
        TREE | {"a": a[::-1]},
        TREE | {"a": a.reshape(3, 2, 4)},
        TREE | {"a": a.view(np.int32)},
        TREE | {"b": nested},
        TREE | {"g": TREE["g"][::-1]},
        TREE | {"f": TREE["f"].conj()},
        TREE | {"h": np.zeros(0, np.float32)},
    ]
    found = [of(tree) for tree in others]
    assert all(len(x) == 16 for x in found)
    # The last has a leaf without elements more, which adds nothing.
    assert len(set(found)) == len(others) - 1
    assert found[-1] == found[0]
    # Each of the four sums moves.
    for other in found[1:-1]:
        same = np.frombuffer(other, np.uint32) == np.frombuffer(found[0], np.uint32)
        assert not same.any()


def test_a_checksum_is_what_it_was() -> None:
    """A ledger is resumed with a later version: the numbers are part of its format."""
    tree = {"w": jnp.arange(6, dtype=jnp.float32).reshape(2, 3)}
    sums = []
    for lane in range(4):
        seed = hashlib.shake_256(f"{lane}:w:float32:(2, 3);".encode()).digest(12)
        first, *factors = (int.from_bytes(seed[i : i + 4], "little") for i in (0, 4, 8))
        total = 0
        for i in range(2):
            for j in range(3):
                word = int(np.float32(3 * i + j).view(np.uint32))
                x = word ^ (first + i * (factors[0] | 1) + j * (factors[1] | 1)) % 2**32
                for factor in (0x85EBCA6B, 0xC2B2AE35):
                    x = (x ^ (x >> 16)) * factor % 2**32
                total += x ^ (x >> 16)
        sums.append(total % 2**32)
    assert np.asarray(digests.checksum(tree)).tolist() == sums


def test_where_a_digest_of_parameters_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the host of a CPU alone; a digest that is there is compared with its like."""
    params = {"w": jnp.arange(6.0)}
    old = digests.of_params(params)
    assert old == digests.sha256(params).hexdigest()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    # They are on a CPU, whatever is the default.
    assert digests.of_params(params) == old
    monkeypatch.setattr(digests, "platforms", lambda params: {"gpu"})
    assert digests.of_params(params, like=old) == old
    with monkeypatch.context() as patch:
        patch.delattr(digests, "sha256")  # Nothing is fetched but the sums.
        new = digests.of_params(params)
    assert new.startswith("checksum:")
    assert len(new) == len("checksum:") + 32
    assert digests.of_params({"w": -params["w"]}) != new
    monkeypatch.undo()
    assert digests.of_params(params, like=new) == new


@pytest.mark.parametrize("dtype", SMALL)
def test_a_checksum_of_less_than_bytes(dtype: str) -> None:
    one, other = (jnp.asarray(x).astype(dtype) for x in ([0, 1, 1], [1, 0, 1]))
    sums = [np.asarray(digests.checksum({"w": x})) for x in (one, other)]
    assert (sums[0] != sums[1]).all()
