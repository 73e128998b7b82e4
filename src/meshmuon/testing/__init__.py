"""Oracles for tests, shipped: yours may need them too."""

from meshmuon.testing.reference import ReferenceMuon, plain_newton_schulz, svd_polar

__all__ = ["ReferenceMuon", "plain_newton_schulz", "svd_polar"]
