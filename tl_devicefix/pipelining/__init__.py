"""Many runs of one model at once: each device computes for another run."""
