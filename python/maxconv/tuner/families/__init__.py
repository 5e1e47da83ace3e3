"""The spaces of the kernels that there are, as lists of schedule rules."""
