"""The roots of maxconv's shared libraries: C functions for callers without a
graph."""
