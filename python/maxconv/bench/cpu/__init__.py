"""The benchmark of a CPU: its data, its contenders and their run."""
