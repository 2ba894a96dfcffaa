"""Blocks on other hosts: modules whose forward is a call of a worker there."""
