"""Many runs of one model in flight: each device computes for another run."""
