"""Policies that run in a policy server, for example on a GPU near the robots, instead of in the session."""
