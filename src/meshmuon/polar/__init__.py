"""ORTHOGONALIZE it: pure math on plain tensors."""
