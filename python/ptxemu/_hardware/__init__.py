"""The machine: memories with their shadows, barriers, blocks, the scheduler."""
