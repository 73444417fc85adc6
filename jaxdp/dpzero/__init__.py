"""DPZero and DPGD-0th: noised slopes along shared random directions."""
