"""The tuner: searches the configurations of a kernel for one problem.

Rules generate a constraint model (``rules``, ``generators``, ``model``, ``families``), and a solver
draws configurations that the kernel takes (``solver``, ``space``).
"""
