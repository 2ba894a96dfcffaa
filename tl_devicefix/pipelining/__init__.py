"""Many runs of one model at the same time: each device computes for another run."""
