"""MOVE it: the only code that calls collectives, or asks about other ranks."""
