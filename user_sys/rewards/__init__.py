"""Rewards that are computed from stored episodes: the interface, the built-in ones, audits, and labelling."""
