"""Before anything is loaded: the plan, what a job takes, rehearsals of it, and what would fit."""
