"""The benchmark of a GPU: what is built for it, its contenders and their run."""
