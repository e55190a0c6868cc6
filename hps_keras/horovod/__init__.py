"""Horovod's names: a script's own collectives, process sets and queries."""
