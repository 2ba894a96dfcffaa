"""Many runs of one model at the same time: each device is busy with a different one."""
