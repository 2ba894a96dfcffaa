"""Before anything is loaded: the plan, what a job takes, dry runs of it, and what would fit."""
