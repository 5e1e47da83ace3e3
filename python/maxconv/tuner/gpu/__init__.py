"""Measures configurations of the Hopper implicit GEMM: builds here, runs where a GPU is."""
