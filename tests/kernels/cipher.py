"""The cipher of all randomness, as its paper has it."""


def block(key: list[int], counter: list[int]) -> list[int]:
    """Threefry-4x32 with twenty rounds as the paper has it, in Python's integers."""
    rotations = [(10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10)]
    rotations += [(18, 20)]
    schedule = [*key, 0x1BD11BDA ^ key[0] ^ key[1] ^ key[2] ^ key[3]]
    x = [(c + k) % 2**32 for c, k in zip(counter, key, strict=True)]
    for i in range(20):
        pairs = [(0, 1), (2, 3)] if i % 2 == 0 else [(0, 3), (2, 1)]
        for (a, b), r in zip(pairs, rotations[i % 8], strict=True):
            x[a] = (x[a] + x[b]) % 2**32
            x[b] = ((x[b] << r | x[b] >> 32 - r) % 2**32) ^ x[a]
        if i % 4 == 3:
            n = i // 4 + 1
            x = [(word + schedule[(n + j) % 5]) % 2**32 for j, word in enumerate(x)]
            x[3] = (x[3] + n) % 2**32
    return x
