"""Triton kernels behind the matrix operations of `polar` and the element-wise ones of `update`.

Nothing here imports Triton until a kernel is launched: `meshmuon` works without it.

- `symmetric_matmul.symmetric_matmul`: batched alpha·A·Bᵀ + beta·C + gamma·I for products known to be symmetric, at half
  the arithmetic.
- `elementwise`: momentum, norm and cast on the way in, decay and update on the way out, over many tensors per launch.

The files that hold `@triton.jit` functions (`symmetric_tiles.py`, `elementwise_tiles.py`) are imported on first use.
"""
