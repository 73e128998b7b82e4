"""BEFORE and AFTER the orthogonalization: element-wise, on plain tensors."""
