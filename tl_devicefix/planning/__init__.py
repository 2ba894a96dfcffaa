"""Before anything is loaded: the plan, dry runs of a job, and what a usual job takes."""
