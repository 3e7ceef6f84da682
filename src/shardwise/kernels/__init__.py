"""Kernels: one folder per operation, with fast paths beside a plain reference (naive.py).

This package is a leaf. It knows neither models nor the run file, and its errors speak of the
kernels.

Shapes, as in the whole project: B batch, T tokens, D model width, N query heads, K key/value heads,
H head size, S state size, V vocabulary, F feed-forward width, E experts, R LoRA rank, C chunk.
Where the place of a token does not matter, B and T are one dim: `rows`.
"""
