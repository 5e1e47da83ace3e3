"""Whole PyTorch models, timed as users run them: eager, compiled by torch, and with maxconv."""
