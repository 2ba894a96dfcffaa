"""Before a load: the plan, dry runs of a job, and estimates of usual jobs."""
