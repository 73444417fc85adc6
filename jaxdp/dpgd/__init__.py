"""DP-GD: noised sums of clipped per-record gradients, the first-order baseline."""
