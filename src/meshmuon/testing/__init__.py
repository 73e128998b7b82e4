"""Oracles for tests, shipped: yours may need them too."""

from meshmuon.testing.ranks import RankError, RankPool
from meshmuon.testing.reference import ReferenceMuon, plain_newton_schulz, svd_polar
from meshmuon.testing.replay import Replay

__all__ = ["RankError", "RankPool", "ReferenceMuon", "Replay", "plain_newton_schulz", "svd_polar"]
