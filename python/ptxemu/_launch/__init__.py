"""From a function of a module to a run of all its blocks."""
