"""Many runs of one model: which of them need not start at its first block, and in what order."""
