"""Programs for those who work on MemScale: `python -m tools.NAME` at the root of the repository."""
