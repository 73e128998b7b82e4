"""WHO computes what, and together with what: pure data."""
