"""WHEN things happen during a step."""
