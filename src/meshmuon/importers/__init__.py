"""State from and for other optimizers: a run that began with another Muon goes on here, or the other way round.

saved files → unpack (ranks, parts) → dialect (whose is it) → whole (one file of all) → read (records in our words)
            → match (whose state is whose) → `Muon.load_state_dict`, which takes all of it or nothing
"""

from meshmuon.importers.export import export_torch_state
from meshmuon.importers.load import load_foreign_state
from meshmuon.importers.report import ImportReport

__all__ = ["ImportReport", "export_torch_state", "load_foreign_state"]
