"""A kernel's run as a JSON file describes it: what the command line reads, compares and draws."""
