"""Warps, the paths of their lanes, and how an instruction becomes a step of one."""
